"""Specification of an ensemble's members, which must be equal on all ranks.

Stacking needs tensors of equal shape. As vmap runs one member's code for all, everything else must be equal, too: a
different dropout rate, mode or attribute of a layer would be ignored without an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist

from ..agreement import check_lists, first_difference, gather_or_raise, gather_values
from ..errors import MismatchError

__all__: list[str] = []

Tensors = dict[str, torch.Tensor]


@dataclass
class MemberSpec:
    """The specification of one member.

    ``lines`` is its description. ``tensors`` has (is a parameter, name, dtype, shape, requires_grad) of each tensor.
    ``keys`` maps the keys of its state to the names of tensors; tied weights have two keys with one name. ``device`` is
    the type of its device.
    """

    number: int
    lines: list[str]
    tensors: list[tuple[bool, str, torch.dtype, tuple[int, ...], bool]]
    keys: dict[str, str]
    device: str

    @staticmethod
    def of(members: Sequence[torch.nn.Module], numbers: range) -> MemberSpec:
        """The specification of these members; ValueError if two of them differ."""
        model = members[0]
        numbered = [(number, [*_described(member)]) for number, member in zip(numbers, members, strict=True)]
        if text := _difference(numbered):
            raise ValueError(text)
        named: list[tuple[bool, str, torch.Tensor]] = [(True, *each) for each in model.named_parameters()]
        named += [(False, *each) for each in model.named_buffers()]
        if not named:
            raise ValueError(
                f"DistributedEnsemble: member {numbers[0]}, a {type(model).__name__}, has neither parameters nor "
                "buffers: all members would be equal"
            )
        tensors = [(is_one, name, each.dtype, tuple(each.shape), each.requires_grad) for is_one, name, each in named]
        names = {id(each): name for _, name, each in named}
        state = model.state_dict(keep_vars=True)
        keys = {key: names[id(each)] for key, each in state.items() if id(each) in names}
        return MemberSpec(*numbered[0], tensors, keys, named[0][2].device.type)

    def as_tuple(self) -> tuple[Any, ...]:
        """The fields, to be sent to another rank."""
        return (self.number, self.lines, self.tensors, self.keys, self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that its outputs probably have: that of its first tensor of floats."""
        return next(
            (each[2] for each in self.tensors if each[2].is_floating_point or each[2].is_complex), torch.float32
        )

    def stacks_of_none(self, device: torch.device) -> tuple[Tensors, Tensors]:
        """The stacked parameters and buffers of a rank without members."""
        parameters: Tensors = {}
        buffers: Tensors = {}
        for is_parameter, name, dtype, shape, requires_grad in self.tensors:
            empty = torch.empty(0, *shape, dtype=dtype, device=device, requires_grad=requires_grad)
            (parameters if is_parameter else buffers)[name] = empty
        return parameters, buffers


def agree_on_members(
    count: int, spec: MemberSpec | None, failure: Exception | None, group: dist.ProcessGroup
) -> MemberSpec:
    """The specification of a member, on every rank; every rank raises if two differ.

    ``spec`` is None on a rank without members, and on a rank that failed.
    """
    rank, size = group.rank(), group.size()
    digest = spec and hashlib.sha256("\n".join(spec.lines).encode()).hexdigest()
    # A rank that has no member takes the spec of the last rank, which always has one.
    for_others = spec.as_tuple() if spec and size > count and rank == size - 1 else None
    found = gather_or_raise("DistributedEnsemble", (count, digest, for_others), failure, group)
    remedy = "Give the same count of members on every rank"
    check_lists("DistributedEnsemble", [[f"an ensemble of {its} members"] for its, _, _ in found], remedy, group)
    if len({digest for _, digest, _ in found if digest}) > 1:
        members = gather_values(spec and (spec.number, spec.lines), group)
        raise MismatchError(f"rank {rank}: {_difference([each for each in members if each])}")
    return spec or MemberSpec(*cast(tuple[Any, ...], found[-1][2]))


@contextmanager
def own_random_numbers(rank: int, device: torch.device) -> Iterator[None]:
    """Context in which random numbers differ between ranks, even if all ranks have the same seed.

    The seed of the context is drawn from the default generator, whose seed or saved state therefore determines it.
    """
    seed = int(torch.randint(2**62, ())) + rank
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.random.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _described(model: torch.nn.Module) -> Iterator[str]:
    yield f"training={model.training}"
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, each in named:
            grad = f", requires_grad={each.requires_grad}" if kind == "parameter" else ""
            yield f"{kind} {name!r} ({each.dtype}, shape {tuple(each.shape)}, on {each.device.type}{grad})"
    for name, module in model.named_modules():
        own = type(module).__module__.startswith("torch.nn.")  # others may print a member's name
        settings = f"{module.extra_repr()}, training={module.training}" if own else f"training={module.training}"
        yield f"layer {name!r} {type(module).__qualname__}({settings})"
        for key, value in sorted(vars(module).items()):
            if not key.startswith("_") and key != "training" and (text := _setting(value)):
                yield f"layer {name!r} {type(module).__qualname__} with {key}={text}"


def _setting(value: Any) -> str:
    """The text of an attribute that may change the result of a layer and must be equal; "" for others.

    Strings are not compared, because a string may be a member's name.
    """
    if value is None or isinstance(value, bool | int | float | complex | torch.dtype):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_setting, value))})"
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return value.__qualname__
    if not isinstance(value, torch.Tensor):
        return ""
    text = f"{value.dtype} of shape {tuple(value.shape)}"
    if value.layout != torch.strided or value.device.type == "meta":
        return text
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return f"{text}, values {hashlib.sha256(plain.numpy().tobytes()).hexdigest()[:16]} (a buffer's may differ)"


def _difference(numbered: Sequence[tuple[int, list[str]]]) -> str | None:
    """The text of an error that names the first member that differs, and the difference; None if all are equal."""
    if found := first_difference(numbered):
        return (
            f"DistributedEnsemble: member {found.first} has {found.here}, member {found.second} has {found.there}; "
            "members must be the same in all but the values of their parameters and buffers"
        )
    return None
