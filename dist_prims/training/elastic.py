"""Elastic training: ranks may die, leave and join; training resumes from the last checkpoint on any number of ranks.

torchrun restarts all ranks whenever one has failed, or a host has come or gone; the program has to resume where it was.
Three things make that exact:

- the *global* batch of every step is a function of seed and step (:class:`GlobalBatches`): neither the samples nor
  their order depend on the number of ranks, and a weight on a rank's loss makes the averaged gradient that of the whole
  batch. So the step is the same on 3 ranks as on 1, but for the order of additions;
- a rank that receives SIGTERM (torchrun sends it before it changes the membership, and so do clusters that reclaim a
  host) does not stop in the middle of a step: all ranks learn of the signal after the same step, save, and exit
  (:class:`StopRequest`);
- a rank that dies costs at most the steps since the last checkpoint (:func:`elastic_steps`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from ..agreement import check_lists
from ..collectives.call import group_of
from ..collectives.flat import split_evenly
from .checkpoint import Checkpoints
from .checkpoint.all_or_none import together
from .checkpoint.plain_state import whole_number
from .data import Permutation
from .partition import Items

__all__ = ["GlobalBatches", "StopRequest", "elastic_steps"]


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
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        if batch < 1 or len(data) < 1:
            raise ValueError(f"GlobalBatches: batch={batch} and {len(data)} items; there must be at least one of each")
        members = group_of(group, "GlobalBatches")
        self._rank, self._size = members.rank(), members.size()
        self._data, self._collate, self._shuffle = data, collate, shuffle
        self._count, self._batch, self._seed = len(data), batch, seed
        self._order = Permutation(self._count, [seed, 0])
        self._order_of = 0  # the epoch
        self.step = 0

    def __len__(self) -> int:
        """Steps an epoch."""
        return -(-self._count // self._batch)

    @property
    def epoch(self) -> int:
        return self.step // len(self)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self

    def __next__(self) -> tuple[Any, ...]:
        indices, weight = self._share()
        self.step += 1
        items = [self._data[index] for index in indices]
        batch = self._collate(items)
        several = isinstance(items[0], tuple | list) and isinstance(batch, tuple | list)
        return (*(batch if several else (batch,)), weight)

    def resize(self, group: dist.ProcessGroup | None = None) -> None:
        """Share the batches from the next step on over the ranks of another group."""
        members = group_of(group, "GlobalBatches.resize")
        self._rank, self._size = members.rank(), members.size()

    def _share(self) -> tuple[list[int], float]:
        start = self.step % len(self) * self._batch
        total = min(self._batch, self._count - start)
        lengths = split_evenly(total, self._size)
        low = start + sum(lengths[: self._rank])
        mine = np.arange(low, low + lengths[self._rank])
        positions = mine if len(mine) else np.array([start])
        return self._items(positions), len(mine) * self._size / total

    def _items(self, positions: np.ndarray[Any, np.dtype[np.int64]]) -> list[int]:
        if self._shuffle and self._order_of != self.epoch:
            self._order, self._order_of = Permutation(self._count, [self._seed, self.epoch]), self.epoch
        found: list[int] = (self._order(positions) if self._shuffle else positions).tolist()
        return found

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain numbers."""
        return {"step": self.step, **self._same()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, on any number of ranks."""
        for name, value in self._same().items():
            if state[name] != value:
                raise ValueError(
                    f"GlobalBatches: the state has {name}={state[name]}, and here it is {value}; make both the same"
                )
        self.step = int(state["step"])

    def _same(self) -> dict[str, Any]:
        return {"count": self._count, "batch": self._batch, "seed": self._seed, "shuffle": self._shuffle}


class StopRequest:
    """Records a stop signal, and reports it to all ranks after the same step; made in the main thread.

    >>> with StopRequest() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.agreed()
    True
    """

    def __init__(self, group: dist.ProcessGroup | None = None, number: signal.Signals = signal.SIGTERM) -> None:
        self._group, self._number, self._received = group_of(group, "StopRequest"), number, False
        only_cuda = dist.get_backend(group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if only_cuda else torch.device("cpu")
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)
        self._process = os.getpid()
        self._before = (
            signal.signal(number, self._on_signal) or signal.SIG_DFL
        )  # None: set by C, and cannot be set again

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if (
            os.getpid() != self._process
        ):  # a process forked since then, which never calls agreed(): it ends as without us
            signal.signal(number, self._before)
            signal.raise_signal(number)
        else:
            self._received = True

    def agreed(self) -> bool:
        """Whether any rank has received the signal; call it on all ranks."""
        self._flag.fill_(self._received)
        dist.all_reduce(self._flag, dist.ReduceOp.MAX, self._group)
        return bool(self._flag.item())

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(self._number, self._before)


def elastic_steps(checkpoints: Checkpoints, last: int, *, every: int) -> Iterator[int]:
    """Restore, then the numbers of the steps that are left below ``last``, with a checkpoint after ``every`` of them.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> weight = torch.zeros(1)
    >>> for step in elastic_steps(Checkpoints(folder.name, {"weight": weight}), 5, every=2):
    ...     weight += step
    >>> list(elastic_steps(Checkpoints(folder.name, {"weight": weight}), 7, every=2)), weight
    ([5, 6], tensor([10.]))
    >>> folder.cleanup()

    The body of the loop is the step. If any rank gets SIGTERM, all save after the step that they are in and leave by
    SystemExit with code 143, on which torchrun restarts the remaining members. With several things to iterate write
    ``for step, batch in zip(elastic_steps(...), batches)``, with this first, so that later iterators are restored
    before their first item. SIGTERM is handled so until the iterator ends: if the loop may be left early and the
    iterator is in a variable, ``close()`` it.
    """

    def asked() -> tuple[int, int]:
        if whole_number(every, "every") < 1:
            raise ValueError(f"every={every} must be at least 1")
        return whole_number(last, "last"), whole_number(every, "every")

    found = together("elastic_steps", asked, checkpoints.group)
    texts = [[f"last={last}, every={every}"] for last, every in found]
    check_lists("elastic_steps", texts, "Give the same on every rank", checkpoints.group)
    with StopRequest(checkpoints.group) as stop:
        step = checkpoints.restore()
        while step < last:
            yield step
            step += 1
            leave = stop.agreed()
            if leave or step % every == 0 or step == last:
                checkpoints.save(step)
            if leave and step < last:
                raise SystemExit(128 + signal.SIGTERM)
