"""Sharded streams: each sample comes once an epoch over all ranks and workers, and can be resumed after a crash.

A *shard* is a source, and a *consumer* a worker of a rank. Each consumer reads equally many whole shards. The samples
of a shard that is left over go to several consumers in turn. A resumed consumer reads its shards again and skips what
it has yielded. If the consumers change within an epoch, the rest of each old consumer becomes a shard for the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from ...agreement import gather_values
from .data_rank import place_of
from .permutation import Permutation

__all__: list[str] = []


class ShardedIterable:
    """The samples of ``open(source)`` for each of ``sources``, which must give the same samples each time.

    >>> stream = ShardedIterable([range(0, 4), range(4, 7)], seed=1)
    >>> before, state = next(stream.batches(2)).tolist(), stream.state_dict()
    >>> stream.load_state_dict([state])  # of each rank; on any number of ranks
    >>> sorted([*before, *(item for batch in stream.batches(4) for item in batch.tolist())])
    [0, 1, 2, 3, 4, 5, 6]

    - ``sources``: shuffled in each epoch by ``seed``. ``open``: gives the samples of one of them.
    - ``group``: the ranks that share the samples. ``workers``: processes of each rank's DataLoader.
    - ``window``: the number of samples that are shuffled together.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        open: Callable[[Any], Iterable[Any]] = iter,
        *,
        group: dist.ProcessGroup | None = None,
        workers: int = 0,
        window: int = 1,
        seed: int = 0,
    ) -> None:
        self._sources, self._open, self._workers, self._window, self._seed = sources, open, workers, window, seed
        self.rank, self.size = place_of("ShardedIterable", group, None, None)
        self._begin(0, [])

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, with an order of its own, or continue it if it has begun."""
        if epoch != self.epoch:
            self._begin(epoch, [])

    def _begin(self, epoch: int, before: list[list[int]]) -> None:
        self._order = Permutation(len(self._sources), [self._seed, epoch])(range(len(self._sources))).tolist()
        self.epoch = epoch
        self._before = before  # for each change of the consumers: how many samples each old consumer had yielded
        self._yielded = [0] * max(self._workers, 1)  # the samples since the last change, by worker of this rank
        self._full = [*self._yielded]  # how many these samples would be if every batch had been full

    def batches(self, size: int, collate: Callable[[list[Any]], Any] = default_collate, **kwargs: Any) -> Iterator[Any]:
        """The rest of the epoch in batches, from a DataLoader with these options; ranks may have different numbers.

        A sample counts when its batch is yielded: save the state after the step that trains on the batch.
        """
        yielded, full = self._yielded, self._full
        data = _OfWorker(partial(self._batches, size, collate))
        loader = DataLoader(data, batch_size=None, collate_fn=tuple, num_workers=self._workers, **kwargs)
        for turn, (worker, samples, batch) in enumerate(loader):
            if yielded is not self._yielded:
                raise RuntimeError("ShardedIterable: call batches() again after a change of the position")
            yielded[worker] += samples
            full[turn % len(full)] += size  # the loader takes the batches of its workers in turn
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position of this rank in the epoch, as plain numbers; ``load_state_dict`` takes all ranks' positions."""
        options = {"shards": len(self._sources), "seed": self._seed, "window": self._window, "workers": len(self._full)}
        counts = {"yielded": [*self._yielded], "full": [*self._full], "before": [*map(list, self._before)]}
        return {**options, "epoch": self.epoch, "rank": self.rank, "size": self.size, **counts}

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all ranks of one save, on any number of ranks and workers."""
        states = [states] if isinstance(states, Mapping) else sorted(states, key=lambda state: int(state["rank"]))
        ranks, own = [state["rank"] for state in states], self.state_dict()
        if not states or ranks != list(range(states[0]["size"])):
            raise ValueError(f"ShardedIterable: states of ranks {ranks}; give a list of the states of all ranks")
        expected = {**states[0], **{name: own[name] for name in ("shards", "seed", "window")}}
        for name in ("shards", "seed", "window", "workers", "epoch", "size", "before"):
            values = [state[name] for state in states]
            if any(value != expected[name] for value in values):
                raise ValueError(f"ShardedIterable: {name} of the states is {values}; expected: {expected[name]} each")
        yielded = [count for state in states for count in state["yielded"]]
        self._begin(int(states[0]["epoch"]), [*map(list, states[0]["before"]), yielded])

    def resize(self, group: dist.ProcessGroup | None = None, *, states: Sequence[dict[str, Any]] | None = None) -> None:
        """Continue the epoch on the ranks of another group. ``states``: the states of the old ranks that are left.

        A lost rank counts as having yielded as many full batches as another rank, so no sample is lost. Samples repeat
        only if one of its workers had ended before another, or the ranks that are left had ended before it.
        """
        left = [*(gather_values(self.state_dict(), group) if states is None else states)]
        changes = max(len(state["before"]) for state in left)
        left = [state for state in left if len(state["before"]) == changes]  # the last resize of others failed
        self.rank, self.size = place_of("ShardedIterable.resize", group, None, None)
        lost = {*range(left[0]["size"])} - {state["rank"] for state in left}
        full = [max(counts) for counts in zip(*(state["full"] for state in left), strict=True)]
        self.load_state_dict([*left, *({**left[0], "rank": number, "yielded": full} for number in lost)])

    def _batches(self, size: int, collate: Callable[[list[Any]], Any], worker: int) -> Iterator[tuple[int, int, Any]]:
        """The worker's number, the number of samples and the batch, for the rest of its samples."""
        number, consumers = self.rank * len(self._full) + worker, self.size * len(self._full)
        samples = self._read(len(self._before), number, consumers, self._yielded[worker])
        while items := [*islice(samples, size)]:
            yield worker, len(items), collate(items)

    def _read(self, stage: int, consumer: int, consumers: int, skip: int) -> Iterable[Any]:
        """The samples of a consumer since change number ``stage`` of the consumers, without the first ``skip``. After a
        change the shards are what the old consumers had not yielded."""
        if stage:
            old = self._before[stage - 1]
            shards = [partial(self._read, stage - 1, number, len(old), old[number]) for number in range(len(old))]
        else:
            shards = [partial(self._open, self._sources[number]) for number in self._order]
        samples = _assigned(shards, consumer, consumers)
        if not stage and self._window > 1:
            samples = _shuffled(samples, self._window, [self._seed, self.epoch, consumer, consumers])
        return islice(samples, skip, None)


class _OfWorker(IterableDataset[Any]):
    """The dataset of a DataLoader: in worker number n the iterator ``read(n)``, without workers ``read(0)``."""

    def __init__(self, read: Callable[[int], Iterator[Any]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        return self._read(getattr(get_worker_info(), "id", 0))


def _assigned(shards: Sequence[Callable[[], Iterable[Any]]], consumer: int, consumers: int) -> Iterator[Any]:
    """The samples of the whole shards of a consumer, then every n-th sample of a shard that n consumers share."""
    whole = len(shards) // consumers * consumers
    for number in range(consumer, whole, consumers):
        yield from shards[number]()
    if left := len(shards) - whole:
        # Consumers k, k + left, k + 2 left, ... share the shard that is number k of those left.
        sharers = len(range(consumer % left, consumers, left))
        yield from islice(shards[whole + consumer % left](), consumer // left, None, sharers)


def _shuffled(samples: Iterator[Any], window: int, key: list[int]) -> Iterator[Any]:
    """The samples, with each run of ``window`` samples in a random order that follows from ``key``."""
    for number, items in enumerate(iter(lambda: [*islice(samples, window)], [])):
        yield from (items[index] for index in Permutation(len(items), [*key, number])(range(len(items))))
