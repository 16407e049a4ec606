"""Local SGD: each rank steps alone, and every few steps the ranks take the mean of their parameters.

Where the network is slow, an exchange every ``every`` steps costs ``every`` times less than one a step. The ranks drift
apart in between, most of all at the beginning, so the first ``warm_up`` steps may average gradients instead (post-local
SGD, Lin et al. 2020). The change of the mean parameters in a period is itself a gradient, of opposite sign: ``outer``
gives it to an optimiser of its own, as BMUF (Chen and Huo 2016) and DiLoCo (Douillard et al. 2023) do.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..agreement import check_same, gather_values
from ..collectives.flat import cut
from ..torch_compat import default_group
from .average import average_gradients
from .gradients.bucket_layout import plan
from .gradients.initial_sync import broadcast_coalesced, dtensor_problem

__all__: list[str] = []

_BUCKET_BYTES = 25 * 2**20


class LocalSGD:
    """Averages the parameters of ``model`` every ``every`` steps; call :meth:`step` after each of the optimiser's.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> local = LocalSGD(model, every=2)
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(3, 2)).sum().backward()
    ...     local.average_gradients()  # does something in the first warm_up steps only
    ...     optimizer.step()
    ...     print(local.step())
    False
    True
    False

    Ranks begin with rank 0's parameters and buffers. After each averaging parameters and buffers are the same on all of
    them, to the last bit: floating-point buffers are averaged too, others become rank 0's. ``optimizer`` averages its
    state as well (momentum), of parameters that have one on every rank; where some have none, those that have one keep
    their own, as every rank keeps its counts of steps (Adam's). ``outer`` makes an optimiser for what the ranks
    moved on average, such as ``lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)``; it costs a copy of
    the parameters. Every rank makes as many steps; after an uneven last period, call :meth:`average`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        every: int = 8,
        group: dist.ProcessGroup | None = None,
        *,
        warm_up: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
    ) -> None:
        if every < 1 or warm_up < 0:
            raise ValueError(f"LocalSGD(every={every}, warm_up={warm_up}): at least 1, and 0 or more steps")
        self.model, self.every, self.group = model, every, group
        self._group = group or default_group()
        self.warm_up, self.optimizer = warm_up, optimizer
        self.steps = 0
        self._averaged_gradients = -1  # at which step
        self._anchor: list[torch.Tensor] = []
        self._outer: torch.optim.Optimizer | None = None
        self._outer_at = warm_up  # the step after which it was last used
        self._agree("LocalSGD", [*model.parameters(), *model.buffers()])
        with torch.no_grad():
            broadcast_coalesced([*model.parameters(), *model.buffers()], 0, self._group)
        self._parameters = self._trained()
        if outer:
            self._anchor = [parameter.detach().clone() for parameter in self._parameters]
            self._outer = outer(self._anchor)

    def average_gradients(self) -> None:
        """Between ``backward()`` and the optimiser's step: the mean over the ranks, while they warm up."""
        if self.steps < self.warm_up:
            average_gradients(self.model, self.group)
        self._averaged_gradients = self.steps

    def step(self) -> bool:
        """Count a step of the optimiser; whether the parameters were averaged after it."""
        if self.steps < self.warm_up and self._averaged_gradients != self.steps:
            raise ValueError(
                f"LocalSGD: step {self.steps} of rank {dist.get_rank(self.group)} is one of the first "
                f"warm_up={self.warm_up}: call average_gradients() between backward() and the optimiser's step"
            )
        self.steps += 1
        since = self.steps - self.warm_up
        due = since >= 0 and since % self.every == 0 and (since > 0 or self.warm_up > 0)
        if due:
            self.average()
        return due

    @torch.no_grad()
    def average(self) -> None:
        """Make parameters and buffers the same on all ranks, now. MismatchError where ranks are at different steps."""
        parameters = self._trained()
        if [id(each) for each in parameters] != [id(each) for each in self._parameters]:
            raise ValueError(
                f"LocalSGD: rank {dist.get_rank(self.group)} trains {len(parameters)} parameters and trained "
                f"{len(self._parameters)} when this was made; make a new LocalSGD after freezing or unfreezing some"
            )
        buffers = [buffer for buffer in self.model.buffers() if buffer.numel()]
        self._agree(f"average after step {self.steps}", [*parameters, *buffers])
        tensors = [*parameters, *buffers, *self._common_state(parameters)]
        means = [tensor.detach() for tensor in tensors if _has_mean(tensor)]
        for numbers in plan(means, range(len(means)), _BUCKET_BYTES):
            _average([means[number] for number in numbers], self.group)
        broadcast_coalesced([tensor for tensor in tensors if not _has_mean(tensor)], 0, self._group)
        if self._outer:
            self._step_outer(self._outer)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the model's and the optimiser's own, which differ from rank to rank except
        just after an averaging."""
        outer = self._outer.state_dict() if self._outer else None
        anchor = [each.clone() for each in self._anchor]
        return {"steps": self.steps, "outer": outer, "outer_at": self._outer_at, "anchor": anchor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where :meth:`state_dict` was taken; load the model and the optimiser, too."""
        shapes = [list(each.shape) for each in state["anchor"]]
        if shapes != [list(each.shape) for each in self._anchor]:
            raise ValueError(
                f"LocalSGD: the state has {len(shapes)} parameters of an outer optimiser and this has "
                f"{len(self._anchor)}, or of other shapes; make it with the same model and the same outer"
            )
        self.steps, self._outer_at = state["steps"], state["outer_at"]
        for mine, saved in zip(self._anchor, state["anchor"], strict=True):
            mine.copy_(saved)
        if self._outer:
            self._outer.load_state_dict(state["outer"])

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _agree(self, what: str, tensors: list[Any]) -> None:
        shapes = [(list(each.shape), each.dtype) for each in tensors]
        outer = (type(self._outer).__name__, self._outer.defaults) if self._outer else None
        inner = type(self.optimizer).__name__ if self.optimizer else None
        layout = zlib.crc32(repr((shapes, outer)).encode())
        device = next((each.device for each in self.model.parameters()), torch.device("cpu"))
        options = f"every={self.every}, warm_up={self.warm_up}, optimizer={inner}"
        text = f"{what}: {options}, {len(tensors)} tensors, layout {layout:08x}"
        remedy = "Every rank must make a LocalSGD of the same model with the same arguments, and as many steps"
        problem = dtensor_problem("LocalSGD", self.model.named_parameters(), self._group)
        check_same(text, remedy, self.group, device, problem)

    def _common_state(self, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        """State that every rank has, in one order: a rank whose batches have not used a parameter has none of it."""
        if not self.optimizer:
            return []
        mine = _state_of(self.optimizer, parameters)
        return [mine[place] for place in sorted(set(mine).intersection(*gather_values([*mine], self.group)))]

    def _step_outer(self, outer: torch.optim.Optimizer) -> None:
        """The outer gradient is the anchor minus the mean. Where no rank has stepped alone since the last averaging,
        the outer gradient is zero, and the momentum must not move the parameters."""
        pairs = list(zip(self._anchor, self._parameters, strict=True))
        if self.steps <= self._outer_at:
            for anchor, parameter in pairs:
                anchor.copy_(parameter)
            return
        for anchor, parameter in pairs:
            anchor.grad = anchor - parameter
        outer.step()
        outer.zero_grad()
        for anchor, parameter in pairs:
            parameter.copy_(anchor)
        self._outer_at = self.steps


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _state_of(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]
) -> dict[tuple[int, str, str], torch.Tensor]:
    """What an optimiser keeps for each element of a parameter (momentum, not counts of steps), by the parameter's
    number, its name there and its dtype. Torch's optimisers call a count "step"; a scalar parameter has its shape."""
    found = {}
    for number, parameter in enumerate(parameters):
        for key, value in optimizer.state.get(parameter, {}).items():
            shaped = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if shaped and key != "step" and _has_mean(value):
                found[number, str(key), str(value.dtype)] = value
    return found


def _average(bucket: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Half types are added in float32: a mean of parameters that differ in the last bits needs those behind them."""
    kind = bucket[0].dtype
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(torch.promote_types(kind, torch.float32))
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for tensor, mean in zip(bucket, cut(flat, [each.numel() for each in bucket]), strict=True):
        tensor.copy_(mean.view_as(tensor))
