"""Types in the agreement on a call: each type of torch differs from all others, also one that can only be moved."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from ranks import span

import dist_prims
from dist_prims.errors import MismatchError


def every_type() -> list[torch.dtype]:
    """All types but the quantized ones, for which torch has no collectives."""
    types = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    return sorted((each for each in types if not str(each).startswith("torch.q")), key=str)


def disagree() -> list[str]:
    """The types that the errors name where rank 1 has the type after the type of rank 0.

    The algorithm has a name because torch sends complex numbers as pairs of real numbers.
    """
    names = []
    types = every_type()
    for number in range(len(types)):
        tensor = torch.empty(4, dtype=types[(number + dist.get_rank()) % len(types)])
        with pytest.raises(MismatchError) as caught:
            dist_prims.broadcast(tensor, 0, algorithm="binomial")
        names += re.findall(r"ank \d+ calls broadcast\(([^,]+), 4 elements", str(caught.value))
    return names


@pytest.mark.parametrize("hosts", ["a a", "a b"])
def test_unlike_types_are_refused_by_name(hosts: str) -> None:
    """All types of one byte without a kernel had one code: 1.0 of one float8 arrived as 1.5 of another."""
    types = every_type()
    for names in span(hosts, disagree):
        assert len(names) == 2 * len(types)
        assert names[1::2] == [*names[2::2], names[0]]
        assert len({*names}) == len(types)
        assert {"float8_e5m2", "float8_e4m3fn", "float4_e2m1fn_x2", "bits8", "uint7", "float32"} <= {*names}


def test_unlike_types_over_gloo() -> None:
    for names in dist_prims.spawn(disagree, 2, backend="gloo", timeout=60):
        assert len({*names}) == len(every_type())
