"""A unit: parameters that are gathered together. A rank always keeps its shard, and the whole only while it is needed.

Otherwise each parameter keeps its shape without memory: all its elements are one NaN, and an operation that reads them
raises (:mod:`.released_parameters`). Autograd's saved tensors do not keep the whole alive either (:mod:`.parameters`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...collectives.flat import cut
from ...torch_compat import all_gather_single, reduce_scatter_single, version_of
from .released_parameters import make_absent, make_present

__all__: list[str] = []


class Unit:
    """Parameters of one dtype and device, all of them trained or all frozen.

    >>> layer = torch.nn.Linear(2, 1)
    >>> with torch.no_grad():
    ...     _ = layer.weight.fill_(3)
    >>> unit = Unit("layer", layer, [layer.weight], dist.group.WORLD)
    >>> unit.shard.tolist(), type(layer.weight).__name__
    ([3.0, 3.0], 'AbsentParameter')
    >>> unit.gather().tolist(), layer.weight.tolist()
    ([3.0, 3.0], [[3.0, 3.0]])
    """

    def __init__(
        self, name: str, model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup
    ) -> None:
        self.name, self.parameters, self._group = name, list(parameters), group
        self.uses = 0  # by forwards that are running
        self.full: torch.Tensor | None = None
        self._trained = parameters[0].requires_grad
        self._slots = _slots(model, parameters)
        self._versions = [version_of(each) for each in parameters]  # setting .data leaves them alone
        self._counts = [each.numel() for each in parameters]
        self._part = -(-sum(self._counts) // group.size())
        own = self._flat([each.detach() for each in parameters]).view(group.size(), -1)[group.rank()].clone()
        self.shard = torch.nn.Parameter(own, requires_grad=self._trained)
        self.free()

    @property
    def trained(self) -> bool:
        return self._trained

    def gather(self) -> torch.Tensor:
        """Gather the parameters, and return them as one flat tensor; they can be read until :meth:`free`."""
        if self.full is None:
            with torch.inference_mode(False), torch.no_grad():
                full = self.shard.new_empty(self._part * self._group.size())
                all_gather_single(full, self.shard.detach(), group=self._group)
                self.full, self._of = full, version_of(self.shard)
                for parameter, piece in zip(self.parameters, self.pieces(full), strict=True):
                    make_present(parameter)
                    parameter.data = piece
        return self.full

    def free(self) -> None:
        """Free the whole; tensors that autograd has unpacked live as long as they are used."""
        self.full = None
        with torch.inference_mode(False):
            self._nothing = self.shard.new_full((), float("nan") if self.shard.dtype.is_floating_point else 0)
            for parameter in self.parameters:
                parameter.data = self._nothing.expand(parameter.shape)
                make_absent(parameter, f"rank {self._group.rank()}: ShardedParameters: {self.name}")

    def replaced(self) -> torch.nn.Parameter | None:
        """A parameter that was replaced by another, or whose data was replaced, or changed while freed."""
        for holder, key, parameter in self._slots:
            if holder.get(key) is not parameter:
                return parameter
        places = [self._nothing] * len(self._counts) if self.full is None else self.pieces(self.full)
        for parameter, place, version in zip(self.parameters, places, self._versions, strict=True):
            moved = parameter.numel() and parameter.data_ptr() != place.data_ptr()
            if moved or (self.full is None and version_of(parameter) != version):
                return parameter
        return None

    @torch.no_grad()
    def keep(self) -> None:
        """Copy changes of the whole to this rank's shard; nothing is sent, as all ranks make the same changes."""
        if self.full is None:
            return
        versions = [version_of(each) for each in self.parameters]
        if version_of(self.shard) == self._of:
            own = self.full.view(self._group.size(), -1)[self._group.rank()]
            if not torch.equal(own, self.shard):
                self.shard.copy_(own)
                self._of = version_of(self.shard)
        elif versions != self._versions:
            raise RuntimeError(
                f"rank {self._group.rank()}: ShardedParameters: within gathered() both the parameters of {self.name} "
                "and their shards were changed; leave gathered() before the optimizer's step"
            )
        self._versions = versions

    def has_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    @torch.no_grad()
    def reduce(self) -> None:
        """Add the mean of the ranks' gradients to the gradient of the shard, and free the gradients."""
        flat = self._flat([parameter.grad for parameter in self.parameters]).div_(self._group.size())
        for parameter in self.parameters:
            parameter.grad = None
        own = torch.empty_like(self.shard)
        reduce_scatter_single(own, flat, group=self._group)
        self.shard.grad = own if self.shard.grad is None else self.shard.grad.add_(own)

    @torch.no_grad()
    def load(self, whole: Sequence[torch.Tensor]) -> None:
        """Load this rank's part of new values."""
        flat = self._flat([each.to(self.shard) for each in whole])
        self.shard.copy_(flat.view(self._group.size(), -1)[self._group.rank()])
        if self.full is not None:
            self.full.copy_(flat)
            self._of = version_of(self.shard)

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's view of ``flat``."""
        found = cut(flat[: sum(self._counts)], self._counts)
        return [piece.view(each.shape) for piece, each in zip(found, self.parameters, strict=True)]

    def _flat(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The tensors as one flat tensor, with zeros for missing ones, padded to a multiple of the number of ranks."""
        like = self.parameters[0]
        flat = torch.zeros(self._part * self._group.size(), dtype=like.dtype, device=like.device)
        for place, tensor in zip(self.pieces(flat), tensors, strict=True):
            if tensor is not None:
                place.copy_(tensor)
        return flat


def _slots(
    model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]
) -> list[tuple[dict[str, torch.nn.Parameter | None], str, torch.nn.Parameter]]:
    """The entries of modules that contain these parameters: (dictionary of the module, key, parameter)."""
    own = {id(each) for each in parameters}
    found = []
    for module in model.modules():
        found += [
            (module._parameters, key, each)
            for key, each in module._parameters.items()
            if each is not None and id(each) in own
        ]
    return found
