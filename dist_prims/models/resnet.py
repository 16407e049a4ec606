"""Residual networks (ResNet-18 to 152), which can be cut into the stages of a pipeline.

Names and initial values of parameters and buffers are torchvision's, so checkpoints load in both directions. Added is
``ResNet.layers``: the network as a sequence that can be cut anywhere between its blocks, each under the name that
it has in the whole, so that a stage's ``state_dict`` is a part of the model's.

>>> model = resnet18(num_classes=10, in_channels=1, small_images=True)
>>> x = image = torch.ones(2, 1, 8, 8)
>>> for name, layer in model.layers():
...     x = layer(x)
>>> name, torch.equal(x, model.eval()(image)), x.shape
('fc', False, torch.Size([2, 10]))

(The outputs differ because the first was in training mode, where a batch is normalised by its own statistics.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["ResNet", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]


class BasicBlock(nn.Module):
    """Two convolutions of 3 x 3 beside a shortcut.

    >>> BasicBlock(64, 128, stride=2)(torch.ones(1, 64, 8, 8)).shape
    torch.Size([1, 128, 4, 4])
    """

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv3x3(channels, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(channels, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """A convolution of 3 x 3 on a quarter of the channels, with the stride, beside a shortcut.

    >>> Bottleneck(256, 128, stride=2)(torch.ones(1, 256, 8, 8)).shape
    torch.Size([1, 512, 4, 4])
    """

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        wide = width * self.expansion
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, wide, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(channels, wide, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """Images (batch, channels, height, width) to the logits of their classes.

    - ``block``: of each of the four layers. ``depths``: the number of blocks of each layer.
    - ``num_classes``: of logits. ``in_channels``: of an image.
    - ``small_images``: the stem (first convolution, no pooling) keeps the size of images, such as 8 x 8 to 64 x 64.

    >>> ResNet(BasicBlock, (1, 1, 1, 1), num_classes=3, small_images=True)(torch.ones(2, 3, 8, 8)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        depths: Sequence[int],
        num_classes: int = 1000,
        *,
        in_channels: int = 3,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small_images else (7, 2)
        self.conv1 = nn.Conv2d(in_channels, 64, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _blocks(block, 64, 64, depths[0], 1)
        self.layer2 = _blocks(block, 64 * block.expansion, 128, depths[1], 2)
        self.layer3 = _blocks(block, 128 * block.expansion, 256, depths[2], 2)
        self.layer4 = _blocks(block, 256 * block.expansion, 512, depths[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.flatten(self.avgpool(x)))  # type: ignore[no-any-return]

    def layers(self) -> list[tuple[str, nn.Module]]:
        """Name and module of all that ``forward`` calls, in order: the stem, each block, the head."""
        layers = []
        for name, child in self.named_children():
            blocks = child.named_children() if isinstance(child, nn.Sequential) else ()
            layers += [(f"{name}.{number}", block) for number, block in blocks] or [(name, child)]
        return layers


def resnet18(num_classes: int = 1000, *, in_channels: int = 3, small_images: bool = False) -> ResNet:
    """ResNet-18; with the arguments of :class:`ResNet`.

    >>> sum(parameter.numel() for parameter in resnet18().parameters())
    11689512
    """
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, in_channels=in_channels, small_images=small_images)


def resnet34(num_classes: int = 1000, *, in_channels: int = 3, small_images: bool = False) -> ResNet:
    """ResNet-34; with the arguments of :class:`ResNet`.

    >>> with torch.device("meta"):
    ...     len(resnet34().layers())
    23
    """
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes, in_channels=in_channels, small_images=small_images)


def resnet50(num_classes: int = 1000, *, in_channels: int = 3, small_images: bool = False) -> ResNet:
    """ResNet-50; with the arguments of :class:`ResNet`.

    >>> with torch.device("meta"):
    ...     len(resnet50().layers())
    23
    """
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, in_channels=in_channels, small_images=small_images)


def resnet101(num_classes: int = 1000, *, in_channels: int = 3, small_images: bool = False) -> ResNet:
    """ResNet-101; with the arguments of :class:`ResNet`.

    >>> with torch.device("meta"):
    ...     len(resnet101().layers())
    40
    """
    return ResNet(Bottleneck, (3, 4, 23, 3), num_classes, in_channels=in_channels, small_images=small_images)


def resnet152(num_classes: int = 1000, *, in_channels: int = 3, small_images: bool = False) -> ResNet:
    """ResNet-152; with the arguments of :class:`ResNet`.

    >>> with torch.device("meta"):
    ...     len(resnet152().layers())
    57
    """
    return ResNet(Bottleneck, (3, 8, 36, 3), num_classes, in_channels=in_channels, small_images=small_images)


def _conv3x3(channels: int, width: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)


def _downsample(channels: int, width: int, stride: int) -> nn.Sequential | None:
    """The projection of the shortcut to the shape of the block's output, if they differ."""
    if channels == width and stride == 1:
        return None
    return nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))


def _blocks(block: type[BasicBlock | Bottleneck], channels: int, width: int, depth: int, stride: int) -> nn.Sequential:
    wide = width * block.expansion
    return nn.Sequential(block(channels, width, stride), *(block(wide, width) for _ in range(depth - 1)))
