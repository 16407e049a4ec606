"""Two simple forms of ResNet-50 on several devices of one process, as a baseline for pipelines.

The first sends the whole batch through one device after the other, so all but one always wait. The second cuts the
batch, and each device works on another part; on CUDA, where a call returns before its kernel has run, nothing more is
needed. Autograd runs the backward in its own order, without a plan.

>>> model = PipelineParallelResNet50(split_size=1, devices=["cpu", "cpu"], num_classes=10).eval()
>>> model(torch.ones(3, 3, 32, 32)).shape
torch.Size([3, 10])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..training.pipeline.split_model import balance
from .resnet import Bottleneck, ResNet

__all__: list[str] = []


class ModelParallelResNet50(ResNet):
    """ResNet-50 whose layers lie on ``devices``, in their order; ``sizes``: how many on each; evenly by default.

    >>> ModelParallelResNet50(["cpu", "cpu"]).sizes  # the stem and two of the four layers; the other two and the head
    [11, 12]

    ``options`` are arguments of :class:`ResNet`. The image is brought to the first device; the output is on the last.
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device] = ("cuda:0", "cuda:1"),
        *,
        sizes: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(Bottleneck, (3, 4, 6, 3), **options)
        layers = [layer for _, layer in self.layers()]
        self.devices = [torch.device(device) for device in devices]
        self.sizes = list(sizes) if sizes is not None else balance([1] * len(layers), len(devices))
        if len(self.sizes) != len(devices) or sum(self.sizes) != len(layers) or min(self.sizes) < 0:
            raise ValueError(
                f"{type(self).__name__}: sizes={self.sizes} must be {len(devices)} numbers, one a device, "
                f"{len(layers)} together"
            )
        for device, part in enumerate(self._parts()):
            for layer in part:
                layer.to(self.devices[device])

    def _parts(self) -> list[list[torch.nn.Module]]:
        layers = iter([layer for _, layer in self.layers()])
        return [[next(layers) for _ in range(size)] for size in self.sizes]

    def _run(self, part: int, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.devices[part], non_blocking=True)
        for layer in self._parts()[part]:
            x = layer(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in range(len(self.devices)):
            x = self._run(part, x)
        return x


class PipelineParallelResNet50(ModelParallelResNet50):
    """The same, for ``split_size`` images at a time: while a device has one part, the device before it has the next.

    >>> PipelineParallelResNet50(split_size=2, devices=["cpu"], num_classes=3)(torch.ones(4, 3, 32, 32)).shape
    torch.Size([4, 3])
    """

    def __init__(
        self, split_size: int = 20, devices: Sequence[str | torch.device] = ("cuda:0", "cuda:1"), **options: Any
    ) -> None:
        if split_size < 1:
            raise ValueError(f"PipelineParallelResNet50: split_size={split_size} must be 1 or more")
        super().__init__(devices, **options)
        self.split_size = split_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = list(torch.split(x, self.split_size))
        for tick in range(len(values) + len(self.devices) - 1):
            for part in reversed(range(len(self.devices))):  # the later device first: it must not wait for new work
                if 0 <= tick - part < len(values):
                    values[tick - part] = self._run(part, values[tick - part])
        return torch.cat(values)
