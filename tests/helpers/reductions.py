"""Every reduction of every type, and what it must give: computed on exact numbers, of all ranks' data at once.

The numbers are such that no sum or product of up to four ranks is rounded, so the result is the same whatever the
order of additions. Only a mean is rounded, once. All ranks hold a number whose sum leaves the range of a half type.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import dist_prims
from dist_prims.schedules import algorithms, build
from dist_prims.torch_compat import reduce_scatter_single

Op = dist.ReduceOp
ALL, NOTHING = slice(None), slice(0)
WHOLE = [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
HALF = [torch.float16, torch.bfloat16]
REAL = [*HALF, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*WHOLE, *REAL, *COMPLEX, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
BITWISE = [Op.BAND, Op.BOR, Op.BXOR]
FACTORS = [
    *(2.0, -1.0, 0.5, 0.0, 256.0, 2.0**40, float("nan")),
    torch.tensor([0.5]),
    torch.tensor(2),
    torch.tensor([0.25], dtype=torch.float16),
    torch.tensor(-0.5, dtype=torch.bfloat16),
    torch.tensor([[1.5]], dtype=torch.float64),
    torch.tensor(3, dtype=torch.uint8),
    torch.tensor([-2], dtype=torch.int8),
    torch.tensor([2**63 + 3], dtype=torch.uint64),
    torch.tensor(1j),
    torch.tensor(True),
]
# An operation, and the factor of a PREMUL_SUM.
CASES: list[tuple[Any, Any]] = [*((op, None) for op in (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX, *BITWISE))]
CASES += [(Op.PREMUL_SUM, factor) for factor in FACTORS]
LARGE = {torch.float16: 40000.0, torch.bfloat16: 224 * 2.0**120}
FOLDS: dict[Any, Callable[[Any, Any], Any]] = {
    Op.SUM: operator.add,
    Op.AVG: operator.add,
    Op.PREMUL_SUM: operator.add,
    Op.PRODUCT: operator.mul,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.BAND: operator.and_,
    Op.BOR: operator.or_,
    Op.BXOR: operator.xor,
}


@functools.cache
def numbers(rank: int, count: int, dtype: torch.dtype) -> Any:
    """What a rank holds. All cases share the tensor: a caller that writes to it takes a clone."""
    at = torch.arange(count)
    if dtype == torch.bool:
        return (at // 2**rank) % 2 == 1
    small = (at * 7 + rank * 3) % 9 - 4
    if dtype in WHOLE:
        limits = torch.iinfo(dtype)
        extremes = [limits.max, limits.min, limits.max // 2 + 1, limits.max // 3, 1]
        values = [extremes[(i + rank) % 5] if i % 3 else max(int(small[i]), limits.min) for i in range(count)]
        return torch.tensor(values, dtype=dtype)
    if dtype in COMPLEX:
        return torch.complex(small / 2.0, small.flip(0) / 2.0).to(dtype)
    found = small / 2.0
    found[1::11] = LARGE.get(dtype, 40000.0)
    found[2::11] = float("nan") if rank == 1 else 1
    found[3::11] = float("-inf") if rank == 1 else float("inf")
    found[4::11] = float("inf")
    return found.to(dtype)


def in_numpy(tensor: torch.Tensor) -> Any:
    """As exact numbers: of Python, or of float64."""
    if tensor.dtype in WHOLE:
        return np.array([int(each) for each in tensor.tolist()], dtype=object)
    wide = torch.complex128 if tensor.is_complex() else tensor.dtype if tensor.dtype == torch.bool else torch.float64
    return tensor.to(wide).numpy()


def is_refused(op: Any, factor: Any, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point and dtype.itemsize == 1:
        return True
    if op in (Op.AVG, Op.PREMUL_SUM) and dtype == torch.bool:
        return True
    if (op in (Op.MIN, Op.MAX) and dtype in COMPLEX) or (op in BITWISE and dtype in REAL + COMPLEX):
        return True
    if isinstance(factor, torch.Tensor):
        if factor.dtype in (torch.complex64, torch.bool):
            return True
        factor = factor.item()
    if factor is None or dtype not in WHOLE:
        return False
    limits = torch.iinfo(dtype)
    return not (factor == factor and limits.min <= factor <= limits.max and factor == int(factor))


def rounded(total: Any, dtype: torch.dtype) -> torch.Tensor:
    if dtype in WHOLE:
        low, span = torch.iinfo(dtype).min, 1 << torch.iinfo(dtype).bits
        return torch.tensor([(int(each) - low) % span + low for each in total], dtype=dtype)
    found = torch.from_numpy(np.asarray(total))
    return (found.to(torch.float32) if dtype in HALF else found).to(dtype)


@functools.cache
def reference(case: int, dtype: torch.dtype, count: int, size: int) -> torch.Tensor:
    """The reduction of all ranks' numbers."""
    op, factor = CASES[case]
    inputs = [in_numpy(numbers(rank, count, dtype)) for rank in range(size)]
    with np.errstate(all="ignore"):
        if factor is not None:
            by = factor.item() if isinstance(factor, torch.Tensor) else factor
            by = int(by) if dtype in WHOLE else by
            products = [each * by for each in inputs]
            if dtype in COMPLEX:
                products = [each.real * by + 1j * (each.imag * by) for each in inputs]
            inputs = [in_numpy(rounded(each, dtype)) for each in products]
        total = functools.reduce(FOLDS[op], inputs)
        if op != Op.AVG:
            return rounded(total, dtype)
        if dtype in WHOLE:
            wrapped = rounded(total, dtype).tolist()
            return torch.tensor([abs(each) // size * (1 if each >= 0 else -1) for each in wrapped], dtype=dtype)
        return rounded(total / size, dtype)


def same(found: torch.Tensor, expected: torch.Tensor, what: Any) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    equal = np.array_equal(in_numpy(found.flatten()), in_numpy(expected.flatten()), equal_nan=found.dtype not in WHOLE)
    assert equal, f"{what}: {found.tolist()} instead of {expected.tolist()}"


_turn = itertools.count()  # of the calls of cases(); each rank makes the same ones
_TURNS = 6


def cases(every_factor: bool) -> Iterator[tuple[int, torch.dtype, Any]]:
    """The number of a case, a type, and what ``torch.distributed`` takes as the operation. Unless ``every_factor``,
    each type has a sixth of the factors, and the next ones in the next call."""
    turn = next(_turn)
    for (at, dtype), (number, (op, factor)) in itertools.product(enumerate(DTYPES), enumerate(CASES)):
        if factor is None:
            yield number, dtype, op
        elif every_factor or (number + at + turn) % _TURNS == 0:
            yield number, dtype, dist._make_nccl_premul_sum(factor)


# Reduces a tensor, and says what this rank has got, and which elements of the whole result that should be.
Reduce = Callable[[torch.Tensor, Any], tuple[torch.Tensor, slice]]


def check(reduce: Reduce, group: Any, count: int, view_as_real: bool = False, every_factor: bool = False) -> None:
    """All types and operations; those that are refused must be refused on all ranks, before anything is sent, or the
    next one does not match. ``view_as_real``: torch.distributed refuses some of complex numbers by itself."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for case, dtype, op in cases(every_factor):
        what = (getattr(reduce, "__name__", reduce), CASES[case], dtype, count)
        mine = numbers(rank, count, dtype).clone()
        if is_refused(*CASES[case], dtype) or (view_as_real and dtype in COMPLEX and CASES[case][0] == Op.PRODUCT):
            with pytest.raises(ValueError, match=r"cannot reduce|cannot multiply|real number|on complex tensors"):
                reduce(mine, op)
        else:
            found, part = reduce(mine, op)
            same(found, reference(case, dtype, count, size)[part], what)


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory that all ranks of the host map."""
    return dist_prims.empty(list(tensor.shape), tensor.dtype).copy_(tensor)


def all_reduce_algorithms(size: int) -> list[str]:
    """The algorithms for so many ranks; some are for powers of two only."""
    found = []
    for name in algorithms("all_reduce"):
        with contextlib.suppress(ValueError):
            build("all_reduce", name, size)
            found.append(name)
    return found


class Collectives:
    """The collectives of ``torch.distributed`` that reduce, over one group."""

    def __init__(self, group: Any = None, every_factor: bool = False) -> None:
        self.group, self.every_factor = group, every_factor
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.members: Any = group or distributed_c10d._get_default_group()
        self.backend: Any = self.members._get_backend(torch.device("cpu"))

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, slice]:
        dist.all_reduce(tensor, op, self.group)
        return tensor, ALL

    def async_all_reduce(self, tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, slice]:
        dist.all_reduce(tensor, op, self.group, async_op=True).wait()
        return tensor, ALL

    def strided_all_reduce(self, tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, slice]:
        column = torch.zeros(len(tensor), 3).to(tensor.dtype)[:, 1]
        return self.all_reduce(column.copy_(tensor), op)

    def shared_all_reduce(self, tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, slice]:
        return self.all_reduce(dist_prims.empty(len(tensor), tensor.dtype).copy_(tensor), op)

    def direct_all_reduce(self, tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, slice]:
        dist_prims.all_reduce(tensor, op, self.group)
        return tensor, ALL

    def coalesced_all_reduce(self, tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, slice]:
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = op
        self.backend.allreduce_coalesced(list(tensor.tensor_split(2)), options).wait()
        return tensor, ALL

    def reduce(self, tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, slice]:
        """To the last rank; the others keep their tensors."""
        before, root = tensor.clone(), self.size - 1
        dist.reduce(tensor, None, op, self.group, group_dst=root)
        if self.rank == root:
            return tensor, ALL
        same(tensor, before, "the tensor of a rank that is not the root")
        return tensor[:0], NOTHING

    def _output(self, tensor: torch.Tensor) -> tuple[torch.Tensor, slice]:
        count = len(tensor) // self.size
        return tensor.new_empty(count), slice(self.rank * count, (self.rank + 1) * count)

    def reduce_scatter(self, tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, slice]:
        output, part = self._output(tensor)
        dist.reduce_scatter(output, [each.clone() for each in tensor.split([len(output)] * self.size)], op, self.group)
        return output, part

    def reduce_scatter_tensor(self, tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, slice]:
        output, part = self._output(tensor)
        reduce_scatter_single(output, tensor, op=op, group=self.group)
        return output, part

    def coalesced_reduce_scatter(self, tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, slice]:
        output, part = self._output(tensor)
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        self.members.reduce_scatter_tensor_coalesced([output], [tensor], options).wait()
        return output, part

    def check(self, *counts: int) -> None:
        """All of them; ``counts`` are multiples of the group's size."""
        every = self.every_factor
        for count in counts:
            for reduce in (self.all_reduce, self.async_all_reduce, self.strided_all_reduce):
                check(reduce, self.group, count, True, every)
            is_direct = hasattr(self.backend, "run_call")
            check(self.direct_all_reduce, self.group, count, not is_direct, every)
            for reduce in (self.coalesced_all_reduce, self.reduce):
                check(reduce, self.group, count, False, every)
            for reduce in (self.reduce_scatter, self.reduce_scatter_tensor, self.coalesced_reduce_scatter):
                check(reduce, self.group, count, False, every)
