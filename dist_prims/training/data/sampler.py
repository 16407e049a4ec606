"""A sampler that gives every item once an epoch over all ranks, even if a resumed run has another number of ranks.

torch's DistributedSampler stores the whole order, repeats items so that the ranks have equally many, and cannot begin
in the middle of an epoch. Here the order is computed (:mod:`.permutation`), and rank r takes the positions r, r + size,
r + 2 size, .... If all ranks have consumed equally many items, these are a prefix of the order, which is one number.
The rest is a suffix that any number of ranks can share. If ranks have consumed different numbers, some positions before
the suffix are open; they are stored as a list (*gaps*).

**Items drawn are not items consumed.** A DataLoader draws ahead of the training, so the sampler cannot know how far
the training is. ``follow(loader)`` or ``advance(items)`` reports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler

from .data_rank import place_of
from .permutation import Permutation

__all__: list[str] = []

_CHUNK = 1 << 14  # positions computed at once: their temporaries stay in the cache
_SAME = ("count", "seed", "shuffle", "uneven")  # what the state and the sampler must agree on

Uneven = Literal["keep", "repeat", "drop"]


class ShardedSampler(Sampler[int]):
    """This rank's indices of ``data`` (an object with a length, or the length), in a new order in each epoch.

    >>> sampler = ShardedSampler(10, rank=0, size=2, seed=1)
    >>> other = ShardedSampler(10, rank=1, size=2, seed=1)
    >>> sorted([*sampler, *other])
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> sampler.advance(2)  # two items here, so also two on the other rank
    >>> alone = ShardedSampler(10, rank=0, size=1, seed=1)
    >>> alone.load_state_dict(sampler.state_dict())
    >>> sorted([*alone]) == sorted([*sampler, *list(other)[2:]]), len(alone)
    (True, 6)

    The ranks are the members of ``group``, or ``size`` ranks of which this one is ``rank``. ``seed`` determines the
    order of each epoch; without ``shuffle`` it is 0, 1, 2, ... ``uneven`` is for numbers of items that the ranks do not
    divide:

    - "repeat", the default, gives some ranks an item that another rank has, too, so that all make equally many steps.
    - "drop" omits the remaining items.
    - "keep" gives every item once, and some ranks one item fewer. A collective in every step would wait for them: use
      it for evaluation, or with ``GradientAverager.join``.

    An iteration yields the rest of this rank's share of the epoch, and ``len`` is the length of the rest. torchdata's
    StatefulDataLoader saves and restores the position of this rank itself, on the same number of ranks; then use
    neither ``follow`` nor ``advance``.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        group: dist.ProcessGroup | None = None,
        rank: int | None = None,
        size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        uneven: Uneven = "repeat",
    ) -> None:
        if uneven not in ("keep", "repeat", "drop"):
            raise ValueError(f"ShardedSampler: uneven={uneven!r}; choose 'keep', 'repeat' or 'drop'")
        self.count = data if isinstance(data, int) else len(data)
        self.seed, self.shuffle, self.uneven = seed, shuffle, uneven
        self.rank, self.size = place_of("ShardedSampler", group, rank, size)
        self.epoch = -1
        self._resizes = 0
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, or continue it if it has begun, as after ``load_state_dict``."""
        if epoch < 0:
            raise ValueError(f"ShardedSampler: epoch {epoch} is negative")
        if epoch != self.epoch:
            self._begin(epoch, np.empty(0, np.int64), 0, 0)

    def resize(
        self, group: dist.ProcessGroup | None = None, *, rank: int | None = None, size: int | None = None
    ) -> None:
        """Continue the epoch on the ranks of another group, as after ``dist_prims.shrink`` or ``grow``.

        >>> data, ranks = list(range(10)), 3
        >>> samplers = [ShardedSampler(data, rank=rank, size=ranks, seed=1) for rank in range(ranks)]
        >>> given = [index for sampler in samplers for index in list(sampler)[:2]]  # each consumes 2; then rank 1 dies
        >>> for sampler in samplers:
        ...     sampler.advance(2)
        >>> samplers[0].resize(rank=0, size=2), samplers[2].resize(rank=1, size=2)
        (None, None)
        >>> sorted([*given, *samplers[0], *samplers[2]]) == data
        True

        The items that count as consumed on this rank count as consumed on all ranks of the old group, also on those
        that are lost; the others are distributed over the new ranks. If the last step is to be repeated, load the state
        from before it first, as :class:`ReplicatedState` does. Iterators made before this call raise RuntimeError: make
        new ones. A new rank loads the state of another one first.
        """
        state = self.state_dict()
        self.rank, self.size = place_of("ShardedSampler.resize", group, rank, size)
        self.load_state_dict(state)
        self._resizes += 1

    def _begin(self, epoch: int, gaps: NDArray[np.int64], start: int, consumed: int) -> None:
        """Set the position: what is left of the epoch are ``gaps`` and all positions from ``start`` on, of which this
        rank has consumed so many items."""
        order = Permutation(self.count, [self.seed, epoch])  # checks count and seed, shuffled or not
        self.epoch, self._order = epoch, order if self.shuffle else None
        self._gaps, self._start, self._consumed = gaps, start, consumed
        self._followed = False  # whether follow() has reached the end

    @property
    def _left(self) -> int:
        """The items of all ranks that were left when the epoch began or the state was loaded."""
        return len(self._gaps) + self.count - self._start

    def _share(self, rank: int, size: int) -> int:
        """The number of these items that a rank gets."""
        whole, rest = divmod(self._left, size)
        return whole + ((self.uneven == "repeat" and rest > 0) or (self.uneven == "keep" and rank < rest))

    def __len__(self) -> int:
        return max(0, self._share(self.rank, self.size) - self._consumed)

    def __iter__(self) -> Iterator[int]:
        return _Indices(self)

    def _indices(self, first: int) -> Iterator[int]:
        """This rank's indices from its item number ``first`` since the epoch began or the state was loaded."""
        order, last = self._order, self._consumed + len(self)
        for low in range(first, last, _CHUNK):
            turns = np.arange(low, min(low + _CHUNK, last), dtype=np.int64) * self.size + self.rank
            positions = self._positions(turns)
            yield from (order(positions) if order else positions).tolist()

    def _positions(self, turns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions of the items with these numbers among those that were left: first the gaps, then the suffix.

        Numbers beyond the end (repeated items) count back from the end of the order.
        """
        gaps = len(self._gaps)
        positions = turns - gaps + self._start
        early, beyond = turns < gaps, turns >= self._left
        positions[early] = self._gaps[turns[early]]
        positions[beyond] = (self.count - 1 - (turns[beyond] - self._left)) % max(self.count, 1)
        return positions

    def advance(self, items: int) -> None:
        """Count ``items`` as consumed on rank 0; other ranks have equally many, or one fewer at the end.

        If a batch is shorter here than on rank 0, give the length on rank 0.
        """
        most = self._share(0, self.size) - self._consumed
        if not 0 <= items <= most:
            raise ValueError(
                f"ShardedSampler: rank {self.rank} advances by {items} items, and ranks have at most {most} left in "
                f"epoch {self.epoch}; call set_epoch() before each epoch, and advance() with the items of each step"
            )
        self._consumed += items

    def follow(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The batches of a DataLoader over this sampler; each counts as consumed when it is yielded.

        Save the state after the step that trains on the batch.
        """
        if loader.batch_sampler is not None and loader.batch_size is None:
            raise ValueError("ShardedSampler.follow: the loader has its own batch_sampler; call advance(items) instead")
        if self._followed and not len(loader):
            raise ValueError(
                f"ShardedSampler: rank {self.rank} has followed epoch {self.epoch} to its end; call set_epoch() before "
                "each epoch"
            )
        resizes = self._resizes
        for batch in loader:
            self._check_not_resized(resizes)
            self.advance(min(loader.batch_size or 1, self._share(0, self.size) - self._consumed))
            self._followed = self._consumed == self._share(0, self.size)
            yield batch
        self._followed = True

    def _check_not_resized(self, resizes: int) -> None:
        """RuntimeError if resize() was called after an iterator was made, when it had been called so many times."""
        if resizes != self._resizes:
            raise RuntimeError(
                f"ShardedSampler: rank {self.rank}: resize() was called after this iterator was made, which has the "
                "items of the old ranks; make a new iterator of the loader"
            )

    def state_dict(self) -> dict[str, Any]:
        """The position in this epoch, as plain numbers."""
        return {
            **{name: getattr(self, name) for name in _SAME},
            "epoch": self.epoch,
            "rank": self.rank,
            "size": self.size,
            "start": self._start,
            "gaps": self._gaps.tolist(),
            "consumed": self._consumed,
        }

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume from a state, on any number of ranks; all of them must load the same.

        The state of rank 0 is enough if all ranks had consumed equally many items (at the end some have one fewer than
        rank 0). Otherwise give the states of all ranks: each item is then still seen once, and at most ranks x (most -
        fewest items) positions are stored as gaps.
        """
        in_order = [states] if isinstance(states, Mapping) else sorted(states, key=lambda state: int(state["rank"]))
        self._check_states(in_order)
        first = in_order[0]
        size = int(first["size"])
        self._begin(int(first["epoch"]), np.array(first["gaps"], dtype=np.int64), int(first["start"]), 0)
        shares = [self._share(rank, size) for rank in range(size)]
        consumed = [int(state["consumed"]) for state in in_order] * (size if len(in_order) == 1 else 1)
        self._begin_with_rest([min(each, share) for each, share in zip(consumed, shares, strict=True)])

    def _check_states(self, states: list[Mapping[str, Any]]) -> None:
        where = f"ShardedSampler: rank {self.rank} loads a state"
        for state in states:
            for name in _SAME:
                if state[name] != getattr(self, name):
                    raise ValueError(
                        f"{where} with {name}={state[name]}, and has {getattr(self, name)}; give both the same"
                    )
            for name in ("epoch", "size", "start", "gaps"):
                if state[name] != states[0][name]:
                    raise ValueError(f"{where} whose ranks differ in {name}: {states[0][name]} and {state[name]}")
        ranks = [int(state["rank"]) for state in states]
        if not states or (len(states) > 1 and ranks != list(range(int(states[0]["size"])))):
            raise ValueError(f"{where} of ranks {ranks}; give one rank's state, or those of all ranks of one save")

    def _begin_with_rest(self, taken: list[int]) -> None:
        """Begin with the items that were not taken; ``taken`` has a number for each rank."""
        # All items before ``low`` are taken and all from ``high`` on are left. Of the items between them rank r of n
        # has the numbers r, r + n, r + 2 n, ...; those that it has not taken become gaps, behind them the old gaps.
        size, left = len(taken), self._left
        low, high = min(taken) * size, min(max(taken) * size, left)
        between = np.arange(low, high, dtype=np.int64)
        between = between[between // size >= np.array(taken, dtype=np.int64)[between % size]]
        gaps = np.concatenate([self._positions(between), self._gaps[high:]])
        self._begin(self.epoch, gaps, self._start + max(0, high - len(self._gaps)), 0)


class _Indices(Iterator[int]):
    """An iterator whose state can be saved and loaded, for torchdata's StatefulDataLoader.

    Loaders draw ahead, so the state of the sampler itself does not show their position.
    """

    def __init__(self, sampler: ShardedSampler) -> None:
        self._sampler, self._resizes = sampler, sampler._resizes
        self._start(0)

    def _start(self, ahead: int) -> None:
        """``ahead``: items drawn beyond those that the sampler counts as consumed."""
        self._next = self._sampler._consumed + ahead
        self._rest = self._sampler._indices(self._next)

    def __next__(self) -> int:
        self._sampler._check_not_resized(self._resizes)
        index = next(self._rest)
        self._next += 1
        return index

    def state_dict(self) -> dict[str, int]:
        return {"ahead": self._next - self._sampler._consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Load the state, after the sampler has loaded its own state of the same time."""
        self._start(state["ahead"])
