"""Sharded streams: each sample once an epoch over ranks and workers, resumable after a crash.

A stream has no length and cannot be read from its middle. Each *consumer* (a DataLoader worker of a rank) therefore
gets the same number of whole shards. The shards that are left over are fewer than the consumers: each is read by
several consumers, which take its samples round-robin (*stripes*). This works for a single shard, too.

What a consumer yields in an epoch is a function of the shards, the seed and its number. Its state is therefore the
number of samples that it has yielded: a resumed consumer reads again from the beginning and skips them, which restores
the shuffle buffer as well. The rest of a consumer's stream is a stream, too. If the number of consumers changes, the
rests of the old consumers are assigned to the new ones as if they were shards. The cost of a resume is reading again
what was read in the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from ...agreement import gather_values
from .data_rank import place_of
from .permutation import Permutation

__all__: list[str] = []

_SAME = ("shards", "seed", "shuffle", "shuffle_buffer")


def _open(source: Any) -> Iterable[Any]:
    samples: Iterable[Any] = source() if callable(source) else source
    return samples


class ShardedIterable(IterableDataset[Any]):
    """The samples of ``sources``: iterables, functions that make one, or anything that ``open`` makes one of.

    >>> streams = [range(0, 4), range(4, 7), range(7, 12)]
    >>> mine, yours = (ShardedIterable(streams, rank=rank, size=2, seed=1) for rank in range(2))
    >>> sorted([*mine, *yours]) == list(range(12))
    True
    >>> [len(batch) for batch in ShardedIterable(streams).batches(5)]
    [5, 5, 2]

    ``open(source)`` may be ``tar_samples``, for paths of archives. Each epoch has its own order of shards unless
    ``shuffle`` is False. ``shuffle_buffer``: the number of samples in memory, of which a random one is yielded. Reading
    a source again must give the same samples. A DataLoader of the program must not have ``persistent_workers``: they
    keep copies that set_epoch() does not change. torchdata's StatefulDataLoader saves and restores the position of this
    rank itself, on the same number of ranks and workers. Ranks may have different numbers of samples; if every step
    communicates, train within ``GradientAverager.join``.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        open: Callable[[Any], Iterable[Any]] = _open,
        *,
        group: dist.ProcessGroup | None = None,
        rank: int | None = None,
        size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_buffer: int = 0,
    ) -> None:
        if shuffle_buffer < 0 or seed < 0:
            raise ValueError(f"ShardedIterable: shuffle_buffer={shuffle_buffer} and seed={seed} must be at least 0")
        self.sources, self.open = sources, open
        self.shards, self.seed, self.shuffle, self.shuffle_buffer = len(sources), seed, shuffle, shuffle_buffer
        self.rank, self.size = place_of("ShardedIterable", group, rank, size)
        self.epoch = 0
        self._last_read = -1  # the epoch that a worker's copy has given
        self._before: list[list[int]] = []  # samples that each consumer has given, by change of consumers
        self._given: list[int] = []  # by this rank's workers since
        self._full: list[int] = []  # the same, if every batch had been full
        self._resizes = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, or continue it if it has begun, as after ``load_state_dict``."""
        if epoch < 0:
            raise ValueError(f"ShardedIterable: epoch {epoch} is negative")
        if epoch != self.epoch:
            self.epoch, self._before, self._given, self._full = epoch, [], [], []

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        return _Samples(partial(self._read, number, workers), self._given[number] if self._given else 0)

    def _read(self, number: int, workers: int, given: int) -> Iterator[Any]:
        """Yield the samples of worker ``number`` of this rank, from sample ``given`` on.

        Errors are raised with the first sample: a loader does not report an error of a worker that comes earlier.
        """
        stream = self._stream(len(self._before), self.rank * workers + number, self.size * workers)
        self._check_workers(workers)
        if get_worker_info():
            self._check_epoch()
        yield from islice(stream, given, None)

    def _check_epoch(self) -> None:
        """Raise in a worker that is asked for the same epoch twice; by default each epoch has new workers."""
        again, self._last_read = self._last_read == self.epoch, self.epoch
        if again and (self.shuffle or self.shuffle_buffer > 1 or self._given or self._before):
            raise ValueError(
                f"ShardedIterable: rank {self.rank}: a worker is asked for epoch {self.epoch} again: set_epoch() "
                "does not reach the workers of a DataLoader with persistent_workers=True; use batches(), or set it to "
                "False"
            )

    def _check_workers(self, workers: int) -> None:
        if len(self._given) not in (0, workers):
            raise ValueError(
                f"ShardedIterable: rank {self.rank} began epoch {self.epoch} with {len(self._given)} workers and "
                f"continues with {workers}; load the states of all ranks by load_state_dict(), or begin a new epoch"
            )

    def batches(
        self,
        batch_size: int,
        *,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] = default_collate,
        **options: Any,
    ) -> Iterator[Any]:
        """The rest of the epoch in batches, from a DataLoader with ``workers`` and ``options``.

        Samples count as given when their batch is yielded, not when a worker has prefetched them. Save the state after
        the step that trains on the batch.
        """
        self._check_workers(max(workers, 1))
        given = self._given = self._given or [0] * max(workers, 1)
        full = self._full = self._full or [0] * len(given)
        resizes = self._resizes
        loader = DataLoader(self, batch_size, num_workers=workers, collate_fn=_Origin(collate), **options)
        for turn, (worker, count, batch) in enumerate(loader):
            if resizes != self._resizes:
                raise RuntimeError(
                    f"ShardedIterable: rank {self.rank}: resize() was called after batches(); call batches() again"
                )
            given[worker] += count
            full[turn % len(full)] += batch_size
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position of this rank in the epoch, as plain numbers; ``load_state_dict`` takes those of all ranks."""
        state = {name: getattr(self, name) for name in _SAME}
        place = {"epoch": self.epoch, "rank": self.rank, "size": self.size}
        since = {"given": list(self._given), "full": list(self._full), "resizes": self._resizes}
        return {**state, **place, "before": [list(each) for each in self._before], **since}

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume from the states of all ranks, on any number of ranks and workers; or from the state of this rank, on
        the same number of ranks and workers."""
        if isinstance(states, Mapping) and self.size > 1 and (states["rank"], states["size"]) == (self.rank, self.size):
            self._check_settings(states)
            self._resizes = int(states.get("resizes", self._resizes))
            self.epoch = int(states["epoch"])
            self._before, self._given = [list(each) for each in states["before"]], list(states["given"])
            self._full = list(states.get("full", self._given))
            return
        given = [states] if isinstance(states, Mapping) else sorted(states, key=lambda state: int(state["rank"]))
        where = f"ShardedIterable: rank {self.rank} loads a state"
        ranks = [int(state["rank"]) for state in given]
        if not given or ranks != list(range(int(given[0]["size"]))):
            raise ValueError(f"{where} of ranks {ranks}; give a list of the states of all ranks of one save")
        for state in given:
            self._check_settings(state)
            for name in ("epoch", "size", "before"):
                if state[name] != given[0][name]:
                    raise ValueError(f"{where} whose ranks differ in {name}: {given[0][name]} and {state[name]}")
        workers = {len(state["given"]) for state in given} - {0}
        if len(workers) > 1:
            raise ValueError(f"{where} whose ranks had {sorted(workers)} workers; all ranks must have equally many")
        self.epoch, self._given, self._full = int(given[0]["epoch"]), [], []
        self._before = [list(each) for each in given[0]["before"]]
        if workers:
            none = [0] * workers.pop()
            self._before.append([count for state in given for count in state["given"] or none])

    def resize(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        states: Sequence[Mapping[str, Any]] | None = None,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        """Continue the epoch on the ranks of another group, as after ``dist_prims.shrink``; all of them call this.

        >>> streams = [range(0, 6), range(6, 12)]
        >>> mine, lost = (ShardedIterable(streams, rank=rank, size=2, seed=1) for rank in range(2))
        >>> given = [next(data.batches(2)).tolist() for data in (mine, lost)]
        >>> mine.resize(states=[mine.state_dict()], rank=0, size=1)
        >>> sorted([*given[0], *given[1], *mine]) == list(range(12))
        True

        ``states`` are those of the ranks of the old group that are left, by default those of the ranks of ``group``.
        If new ranks are among these, give the states, as :class:`ReplicatedState` does.

        A lost rank is taken to have given as many full batches as another rank. So no sample is lost. Samples are
        repeated only where a worker of the lost rank had come to its end before another worker of that rank, or where
        the ranks that are left had come to theirs before the lost one.
        """
        given = [*(gather_values(self.state_dict(), group) if states is None else states)]
        resizes = max(int(state["resizes"]) for state in given)  # if it failed on some ranks, these have given nothing
        given = [state for state in given if state["resizes"] == resizes]  # since it succeeded on others
        self.rank, self.size = place_of("ShardedIterable.resize", group, rank, size)
        missing = {*range(int(given[0]["size"]))} - {int(state["rank"]) for state in given}
        full = [max(counts) for counts in zip(*(state["full"] for state in given if state["full"]), strict=False)]
        self.load_state_dict([*given, *({**given[0], "rank": each, "given": full} for each in missing)])
        self._resizes = resizes + 1

    def _check_settings(self, state: Mapping[str, Any]) -> None:
        for name in _SAME:
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"ShardedIterable: rank {self.rank} loads a state with {name}={state[name]}, and has "
                    f"{getattr(self, name)}; give both the same"
                )

    def _stream(self, stage: int, consumer: int, consumers: int) -> Iterator[Any]:
        """The samples of a consumer since change number ``stage`` of the consumers; 0 is the beginning of the epoch."""
        if stage:
            before = self._before[stage - 1]
            old = [_Rest(self, stage - 1, each, before) for each in range(len(before))]
            yield from _assigned(old, iter, consumer, consumers)
            return
        order = Permutation(self.shards, [self.seed, self.epoch])(range(self.shards)).tolist()
        sources = [self.sources[shard] for shard in order] if self.shuffle else self.sources
        samples = _assigned(sources, self.open, consumer, consumers)
        key = [self.seed, self.epoch, consumer, consumers]
        yield from _shuffled(samples, self.shuffle_buffer, key) if self.shuffle_buffer > 1 else samples


class _Samples(Iterator[Any]):
    """An iterator of one consumer whose state can be saved and loaded, for torchdata's StatefulDataLoader."""

    def __init__(self, read: Callable[[int], Iterator[Any]], given: int) -> None:
        self._read = read
        self._begin(given)

    def _begin(self, given: int) -> None:
        self._given, self._rest = given, self._read(given)

    def __next__(self) -> Any:
        sample = next(self._rest)
        self._given += 1
        return sample

    def state_dict(self) -> dict[str, int]:
        return {"given": self._given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._begin(state["given"])


class _Rest:
    """The rest of the stream of a consumer of an earlier stage."""

    def __init__(self, data: ShardedIterable, stage: int, consumer: int, given: list[int]) -> None:
        self._data, self._stage, self._consumer, self._given = data, stage, consumer, given

    def __iter__(self) -> Iterator[Any]:
        stream = self._data._stream(self._stage, self._consumer, len(self._given))
        return islice(stream, self._given[self._consumer], None)


class _Origin:
    """Collates in the worker, and adds the worker's number and the number of samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[int, int, Any]:
        worker = get_worker_info()
        return worker.id if worker else 0, len(samples), self._collate(samples)


def _assigned(
    sources: Sequence[Any], open: Callable[[Any], Iterable[Any]], consumer: int, consumers: int
) -> Iterator[Any]:
    """The whole sources of a consumer, then a stripe of a source that is left over."""
    whole = len(sources) // consumers * consumers
    for number in range(consumer, whole, consumers):
        yield from open(sources[number])
    left = len(sources) - whole
    if left:
        mine, stripe = consumer % left, consumer // left
        share = len(range(mine, consumers, left))  # consumers that read this one
        yield from islice(open(sources[whole + mine]), stripe, None, share)


def _shuffled(samples: Iterator[Any], size: int, key: list[int]) -> Iterator[Any]:
    random = np.random.RandomState(np.random.SeedSequence(key).generate_state(8))
    kept: list[Any] = []
    for sample in samples:
        if len(kept) < size:
            kept.append(sample)
        else:
            chosen = random.randint(size)
            yield kept[chosen]
            kept[chosen] = sample
    for chosen in random.permutation(len(kept)).tolist():
        yield kept[chosen]
