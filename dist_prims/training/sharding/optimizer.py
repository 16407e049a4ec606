"""ZeRO-1: each rank keeps the optimizer state of its share of the parameters, and steps only those.

In plain data parallelism every rank holds the same state (with Adam twice the parameters) and takes the same step. Here
each parameter has one owner. Its gradient is averaged to the owner only; the owner steps and sends the new value to all
ranks. A reduce and a broadcast replace the all_reduce and send as many bytes.

Whole parameters are assigned, the largest first, each to the rank that has least. Ranges of one flat tensor would be
even to the element, but are correct only for elementwise optimizers. A plain optimizer saves its state by parameter,
too, so checkpoints can be exchanged with it, and loaded on any number of ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...agreement import broadcast_value
from ...collectives.call import group_of
from ...collectives.flat import cut
from ..gradients.bucket_layout import plan
from ..gradients.initial_sync import broadcast_coalesced, check_same_model

__all__: list[str] = []

_BUCKET_BYTES = 25 * 2**20
_NONE, _DENSE, _SPARSE, _CHANGED = range(4)
_WRONG = {
    _SPARSE: "has a sparse gradient; make its layer with sparse=False",
    _CHANGED: "has changed its shape, dtype or device; make a new ZeroOptimizer after a change of the model",
}


class ZeroOptimizer(torch.optim.Optimizer):
    """``optimizer_class`` over ``params``, with its state sharded over the ranks of ``group``.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> optimizer.step()
    >>> [sorted(state) for state in optimizer.state.values()]
    [['exp_avg', 'exp_avg_sq', 'step'], ['exp_avg', 'exp_avg_sq', 'step']]

    ``step()`` averages each gradient to its owner, and frees the gradients of other owners. With ``average=False`` the
    gradients have been averaged already, by a GradientAverager or DistributedDataParallel: more bytes are sent, but
    during the backward. The constructor copies rank 0's parameters to all ranks. ``step()`` reads learning rates from
    ``param_groups``, so schedulers work; ``state`` holds what this rank owns. All ranks make equally many steps. A
    gradient that is missing on some ranks counts as zero there; one that is missing on all is not stepped.

    With float16 call unscale of training.mixed_precision: with torch's GradScaler alone, each rank skips a step on its
    own, and the other ranks wait. To clip, use ``average=False`` and GradientAverager.clip_grad_norm: with
    ``average=True`` no rank has all means.
    """

    collective_state_dict = True  # read by Checkpoints

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        average: bool = True,
        group: dist.ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        if optimizer_class is torch.optim.LBFGS:
            raise ValueError("ZeroOptimizer: LBFGS steps along all parameters, and no rank has all; use another")
        self._group = group_of(group, "ZeroOptimizer")
        self._rank, self._size, self._average = self._group.rank(), self._group.size(), average
        super().__init__(params, {})
        self._parameters = [each for settings in self.param_groups for each in settings["params"]]
        named = [name for settings in self.param_groups for name in settings.get("param_names", [])]
        self._names = named or [str(number) for number in range(len(self._parameters))]
        self._looks = [_look(each) for each in self._parameters]
        settings = [f"average={average}, {getattr(optimizer_class, '__name__', '')}"]
        settings += [_described({**defaults, **each}) for each in self.param_groups]
        check_same_model("ZeroOptimizer", settings, zip(self._names, self._parameters, strict=True), self._group)
        broadcast_coalesced([each.detach() for each in self._parameters], 0, self._group)
        self._owner = balanced([each.numel() * each.requires_grad for each in self._parameters], self._size)
        self._owned = {
            id(each) for each, owner in zip(self._parameters, self._owner, strict=True) if owner == self._rank
        }
        shares = [{**_settings(group), "params": self._of(group["params"])} for group in self.param_groups]
        self._inner = optimizer_class(shares, **defaults)
        self.defaults, self.state = self._inner.defaults, self._inner.state
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            mine.update(_settings(inner))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_inner"):
            raise ValueError("ZeroOptimizer: parameters are assigned to ranks once; give all groups at construction")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, step the parameters of this rank, and receive the others from their owners.

        If a gradient is sparse or a parameter was replaced on any rank, every rank raises ValueError before gradients
        are sent.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_gradient = self._agree()
        if self._average and self._size > 1:
            for owner, parameters in self._messages(with_gradient):
                self._average_to(owner, parameters)
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_settings(mine))
        if self._owned:
            self._inner.step()
        for owner in range(self._size):
            broadcast_coalesced(
                [self._parameters[n].detach() for n in with_gradient if self._owner[n] == owner], owner, self._group
            )
        return loss

    def state_dict(self) -> dict[str, Any]:
        """A copy of the whole state, on every rank, in the form of the plain optimizer's; all ranks must call it."""
        packed = super().state_dict()
        whole: dict[int, Any] = {}
        for owner in range(self._size):
            whole.update(self._state_from(owner, packed["state"]))
        return {**packed, "state": dict(sorted(whole.items()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's share of a whole state, of a ZeroOptimizer on any number of ranks or a plain optimizer."""
        theirs = [len(each["params"]) for each in state_dict["param_groups"]]
        ours = [len(each["params"]) for each in self.param_groups]
        if theirs != ours:
            raise ValueError(
                f"rank {self._rank}: ZeroOptimizer: the state has groups of {theirs} parameters, this optimizer "
                f"of {ours}; load the state of an optimizer over the same model"
            )
        share = {n: each for n, each in state_dict["state"].items() if self._owner[n] == self._rank}
        super().load_state_dict({**state_dict, "state": share})
        self._inner.state = self.state

    def _of(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [each for each in parameters if id(each) in self._owned]

    def _agree(self) -> list[int]:
        """The numbers of the parameters that have a gradient on any rank."""
        codes = [self._kind(number) * self._size + self._rank for number in range(len(self._parameters))]
        table = torch.tensor(codes, dtype=torch.int32, device=self._parameters[0].device)
        dist.all_reduce(table, dist.ReduceOp.MAX, self._group)
        kinds = [divmod(code, self._size) for code in table.tolist()]
        for name, (kind, rank) in zip(self._names, kinds, strict=True):
            if kind in _WRONG:
                raise ValueError(f"rank {self._rank}: ZeroOptimizer: parameter {name!r} on rank {rank} {_WRONG[kind]}")
        return [number for number, (kind, _) in enumerate(kinds) if kind == _DENSE]

    def _kind(self, number: int) -> int:
        parameter = self._parameters[number]
        if _look(parameter) != self._looks[number]:
            return _CHANGED
        if parameter.grad is None:
            return _NONE
        return _DENSE if parameter.grad.layout == torch.strided else _SPARSE

    def _messages(self, with_gradient: Sequence[int]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """The messages: parameters of one owner and dtype."""
        for owner in range(self._size):
            own = [self._parameters[number] for number in with_gradient if self._owner[number] == owner]
            for piece in plan(own, range(len(own)), _BUCKET_BYTES):
                yield owner, [own[number] for number in piece]

    def _average_to(self, owner: int, parameters: list[torch.Tensor]) -> None:
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        flat = torch.cat([each.reshape(-1) for each in gradients]).div_(self._size)  # as DDP: divided, then added
        dist.reduce(flat, group=self._group, group_dst=owner)
        means = cut(flat, [each.numel() for each in parameters])
        for parameter, gradient, mean in zip(parameters, gradients, means, strict=True):
            parameter.grad = gradient.copy_(mean.view_as(gradient)) if owner == self._rank else None

    def _state_from(self, owner: int, own: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """The state that a rank owns: first its structure, then its tensors, as bytes."""
        here = self._rank == owner
        kinds = {n: {key: _kind_of(value) for key, value in each.items()} for n, each in own.items()}
        structure = broadcast_value(kinds, owner, self._group)
        found: dict[int, dict[str, Any]] = {}
        tensors = []
        for number, each in structure.items():
            found[number] = {}
            device = self._parameters[number].device
            for key, (is_tensor, *about) in each.items():
                if is_tensor:
                    shape, dtype = about
                    there = torch.empty(shape, dtype=dtype, device=device)
                    tensors.append(own[number][key].detach().to(device, copy=True) if here else there)
                    found[number][key] = tensors[-1]
                else:
                    (found[number][key],) = about
        broadcast_coalesced(tensors, owner, self._group)
        return found


def _kind_of(value: Any) -> tuple[Any, ...]:
    """Shape and dtype of a tensor, which is sent separately, or the value."""
    return (True, tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else (False, value)


def balanced(counts: Sequence[int], parts: int) -> list[int]:
    """The part of each item. The largest item is assigned first, each to the part with the least sum.

    >>> balanced([10, 40, 20, 30], 2)
    [0, 0, 1, 1]

    No part has more than 4/3 of the least possible (Graham 1969).
    """
    heap = [(0, part) for part in range(parts)]
    owners = [0] * len(counts)
    for number in sorted(range(len(counts)), key=lambda n: -counts[n]):
        has, part = heap[0]
        owners[number] = part
        heapq.heapreplace(heap, (has + counts[number], part))
    return owners


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _described(group: dict[str, Any]) -> str:
    """The options of a group of parameters that ranks can compare."""
    found = {}
    for key, value in sorted(_settings(group).items()):
        plain = value.tolist() if isinstance(value, torch.Tensor) else value
        simple = plain is None or isinstance(plain, bool | int | float | str | tuple | list)
        found[key] = plain if simple else type(plain).__name__
    return f"a group of {len(group['params'])} parameters with {found}"


def _look(parameter: torch.Tensor) -> tuple[Any, ...]:
    return parameter.shape, parameter.dtype, parameter.device
