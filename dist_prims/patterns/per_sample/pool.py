"""Rows for every item of a pool, computed on all ranks: norms of gradients, or other functions of a batch of items.

Each rank computes a range of consecutive items, chunk by chunk, without messages; memory is that of a chunk and of the
results. The results stay on their ranks until they are gathered: all of them, in the order of the pool, or only the
largest, for which each rank sends only its own largest.

>>> from torch.utils.data import TensorDataset
>>> pool = TensorDataset(torch.arange(5.0))
>>> rows = over_pool(lambda x: (x - 2).abs(), pool, chunk=2)
>>> rows.gather()
tensor([2., 1., 0., 1., 2.])
>>> rows.top(3)
(tensor([2., 2., 1.]), tensor([0, 4, 1]))
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset, default_collate

from ...agreement import check_lists, gather_or_raise, gather_rows
from ...torch_compat import default_group, tree_map_only
from ..row_shards import Kind, agree, gather, share

__all__: list[str] = []

_REMEDY = "Every rank gives the same pool and function"
Rows = torch.Tensor | dict[str, torch.Tensor]


class PoolRows:
    """A row for each item of a pool, each on the rank that computed it: ``local``, for the items ``mine``.

    The rows are a tensor, or a dictionary of tensors. Every rank makes the same calls of :meth:`gather` and
    :meth:`top`.

    >>> squares = over_pool(lambda x: x.square(), torch.arange(5.0))
    >>> isinstance(squares, PoolRows), squares.gather()
    (True, tensor([ 0.,  1.,  4.,  9., 16.]))
    >>> squares.top(2)
    (tensor([16.,  9.]), tensor([4, 3]))
    """

    def __init__(
        self, columns: dict[str, torch.Tensor], kinds: dict[str, Kind], count: int, group: dist.ProcessGroup
    ) -> None:
        self.count, self.mine = count, share(count, group.size(), group.rank())
        self._columns, self._kinds, self._group = columns, kinds, group

    @property
    def local(self) -> Any:
        return self._plain(self._columns)

    def __getitem__(self, name: str) -> PoolRows:
        """One of the tensors of a dictionary."""
        if name not in self._columns:
            raise ValueError(f"PoolRows: there is no {name!r}; there are {sorted(self._columns)}")
        return PoolRows({"": self._columns[name]}, {"": self._kinds[name]}, self.count, self._group)

    def gather(self, root: int | None = None) -> Any:
        """All rows in the order of the pool, on every rank, or on ``root`` alone and None elsewhere."""
        for name, rows in self._columns.items():
            agree(f"PoolRows.gather({root}) {name}", rows, None, self._group, rows.device)
        found = {
            name: gather(rows, self._kinds[name], self.count, self._group, rows.device, root)
            for name, rows in self._columns.items()
        }
        return None if None in found.values() else self._plain(found)

    def top(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ``k`` largest rows, or all if there are fewer, and the numbers of their items, on every rank.

        The largest is first; of equal ones the first in the pool. NaN counts as largest. Each rank sends ``k`` values
        and item numbers.
        """
        failure = None
        try:
            self._check_top(k)
        except (TypeError, ValueError) as error:  # sent to the other ranks
            failure = error
        values = next(iter(self._columns.values()))
        k = k if failure else min(k, self.count)
        agree(f"PoolRows.top({k})", values, failure, self._group, values.device)
        if k == 0:
            return values[:0], torch.empty(0, dtype=torch.int64, device=values.device)
        mine = torch.sort(values, descending=True, stable=True).indices[:k]
        best, places = values.new_zeros(k), torch.full((k,), -1, dtype=torch.int64, device=values.device)
        best[: len(mine)], places[: len(mine)] = values[mine], mine + self.mine.start
        best, places = self._all(best), self._all(places)
        there = places >= 0  # ranks are in the order of their items, so a stable sort keeps the first of equals first
        best, places = best[there], places[there]
        order = torch.sort(best, descending=True, stable=True).indices[:k]
        return best[order], places[order]

    def _check_top(self, k: int) -> None:
        if "" not in self._columns or self._kinds[""].shape or self._kinds[""].dtype.is_complex:
            raise ValueError(
                f"PoolRows.top on rank {self._group.rank()}: rows of {self._kinds} have no order; choose a tensor with "
                "one real number for each item, such as rows['norms'].top(k)"
            )
        if operator.index(k) < 0:
            raise ValueError(f"PoolRows.top on rank {self._group.rank()}: k={k} must be 0 or more")

    def _all(self, rows: torch.Tensor) -> torch.Tensor:
        gathered, work = gather_rows(rows.view(torch.uint8), self._group)
        work.wait()
        return gathered.view(-1).view(rows.dtype)

    @staticmethod
    def _plain(columns: Any) -> Any:
        return columns.get("", columns)


def over_pool(
    function: Callable[..., Rows],
    pool: Any,
    *,
    chunk: int = 256,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], object] | None = None,
) -> PoolRows:
    """Call ``function`` on this rank's share of the items of ``pool``, ``chunk`` at a time; every rank makes the call.

    ``pool`` is a map-style data set whose items are tensors or tuples of them. The function gets them as batches on
    ``device``; each element of a tuple is an argument, which may itself be a tuple. ``over_pool(PerSampleGradients(
    model, loss).norms, pool)`` thus takes items (input, target). The function returns a row for each item: a tensor
    whose first dimension is that of the items, or a dictionary of such tensors. An empty pool gives 0 rows of one
    float32. ``progress(done, share)`` is called after each chunk, on every rank for its own items.

    >>> pool = torch.utils.data.TensorDataset(torch.arange(6.0), torch.ones(6))
    >>> rows = over_pool(lambda x, y: {"sum": x + y, "product": x * y}, pool, chunk=4)
    >>> rows["sum"].gather()
    tensor([1., 2., 3., 4., 5., 6.])
    """
    world = group or default_group()
    here, count = torch.device("cpu"), -1
    found: list[dict[str, torch.Tensor]] = []
    columns: dict[str, torch.Tensor] = {}
    failure: Exception | None = None
    try:
        if chunk < 1:
            raise ValueError(f"over_pool on rank {world.rank()}: chunk={chunk} must be at least 1")
        here, count = torch.device(device), len(pool)
        mine = share(count, world.size(), world.rank())
        for begin in range(mine.start, mine.stop, chunk):
            end = min(begin + chunk, mine.stop)
            batch = tree_map_only(torch.Tensor, lambda each: each.to(here), _batch(pool, range(begin, end)))
            found.append(_columns(function(*batch), end - begin))
            if progress is not None:
                progress(end - mine.start, len(mine))
        columns = {name: torch.cat([each[name] for each in found]) for name in (found[0] if found else ())}
    except Exception as error:
        failure = error
    kinds = _agree(columns, failure, count, world)
    ordered = {name: columns[name] if columns else kind.empty(0, here) for name, kind in kinds.items()}
    return PoolRows(ordered, kinds, count, world)


def _batch(pool: Any, numbers: range) -> tuple[Any, ...]:
    if type(pool) is TensorDataset:  # a slice instead of items put together again; a subclass may change items
        return tuple(each[numbers.start : numbers.stop] for each in pool.tensors)
    many = getattr(pool, "__getitems__", None)
    batch = default_collate(many([*numbers]) if many else [pool[number] for number in numbers])
    batch = _tuples(batch)
    return batch if isinstance(batch, tuple) else (batch,)


def _tuples(batch: Any) -> Any:
    """The batch with tuples for lists: ``default_collate`` makes lists, but the inputs of a model are a tuple."""
    return tuple(map(_tuples, batch)) if isinstance(batch, list) else batch


def _columns(rows: Rows, count: int) -> dict[str, torch.Tensor]:
    columns = {name: each.detach() for name, each in ({"": rows} if isinstance(rows, torch.Tensor) else rows).items()}
    if not columns:
        raise ValueError("over_pool: the function returned an empty dictionary; it must return a row for each item")
    for name, each in columns.items():
        if each.dim() == 0 or len(each) != count:
            raise ValueError(
                f"over_pool: {name or 'the function'} returned a tensor of shape {tuple(each.shape)} for {count} "
                "items; it must return a row for each item"
            )
    return columns


def _agree(
    columns: dict[str, torch.Tensor], failure: Exception | None, count: int, group: dist.ProcessGroup
) -> dict[str, Kind]:
    """The kinds of the rows; every rank raises if two ranks with rows differ, or if one gives a ``failure``."""
    mine = {name: (rows.dtype, tuple(rows.shape[1:])) for name, rows in columns.items()} or None
    sent: list[Any] = gather_or_raise("over_pool", (count, mine), failure, group)
    found = [(its, {name: Kind(*each) for name, each in (kinds or {}).items()}) for its, kinds in sent]
    check_lists("over_pool", [[f"{count} items"] for count, _ in found], _REMEDY, group)
    check_lists(
        "over_pool", [[f"rows {dict(sorted(kinds.items()))}"] if kinds else None for _, kinds in found], _REMEDY, group
    )
    return next((kinds for _, kinds in found if kinds), {"": Kind(torch.float32, ())})  # the latter: an empty pool
