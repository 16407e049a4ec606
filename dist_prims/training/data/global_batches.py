"""Global batches: the batch of a step is a function of seed and step, on any number of ranks.

A training whose ranks die, leave and join makes the same steps as one process, except for the order of additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import default_collate

from ...collectives.flat import split_evenly
from .data_rank import place_of
from .partition import Items
from .permutation import Permutation

__all__: list[str] = []


class GlobalBatches:
    """An endless iterator over this rank's share of ``batch`` items a step, in an order independent of the world size.

    >>> batches = GlobalBatches(range(5), batch=2, seed=1)
    >>> drawn = [next(batches) for _ in range(3)]
    >>> sorted(number.item() for numbers, weight in drawn for number in numbers), drawn[0][1]
    ([0, 1, 2, 3, 4], 1.0)
    >>> batches.step, len(batches), batches.epoch
    (3, 3, 1)

    A batch is ``(fields..., weight)`` where items are tuples or lists, else ``(batch, weight)``. ``(loss * weight)``,
    with a mean over the items as loss, has the whole batch's gradient as mean over the ranks. Rank r of n has the items
    from r * b // n to (r + 1) * b // n of a batch of b items. A rank that has no item gets one of another rank's, with
    weight 0. Each epoch has an order of its own, and ends with a shorter batch where the items do not divide. The state
    is the number of the step, so it fits any number of ranks.
    """

    def __init__(
        self,
        data: Items,
        batch: int,
        *,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        if batch < 1 or len(data) < 1:
            raise ValueError(f"GlobalBatches: batch={batch} and {len(data)} items; there must be at least one of each")
        self._rank, self._size = place_of("GlobalBatches", group, None, None)
        self._data, self._collate = data, collate
        self._options = {"count": len(data), "batch": batch, "seed": seed}
        self._order, self._order_of = Permutation(len(data), [seed, 0]), 0  # the epoch
        self.step = 0

    def __len__(self) -> int:
        """Steps an epoch."""
        return -(-self._options["count"] // self._options["batch"])

    @property
    def epoch(self) -> int:
        return self.step // len(self)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self

    def __next__(self) -> tuple[Any, ...]:
        count, batch, seed = self._options.values()
        start = self.step % len(self) * batch
        total = min(batch, count - start)
        lengths = split_evenly(total, self._size)
        low, own = start + sum(lengths[: self._rank]), lengths[self._rank]
        if self._order_of != self.epoch:
            self._order, self._order_of = Permutation(count, [seed, self.epoch]), self.epoch
        positions = np.arange(low, low + own) if own else np.array([start])
        self.step += 1
        items = [self._data[index] for index in self._order(positions).tolist()]
        collated = self._collate(items)
        several = isinstance(items[0], tuple | list) and isinstance(collated, tuple | list)
        return (*(collated if several else (collated,)), own * self._size / total)

    def resize(self, group: dist.ProcessGroup | None = None) -> None:
        """Share the batches from the next step on over the ranks of another group."""
        self._rank, self._size = place_of("GlobalBatches.resize", group, None, None)

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain numbers."""
        return {"step": self.step, **self._options}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there, on any number of ranks."""
        for name, value in self._options.items():
            if state[name] != value:
                raise ValueError(
                    f"GlobalBatches: the state has {name}={state[name]}, and here it is {value}; make both the same"
                )
        self.step = int(state["step"])
