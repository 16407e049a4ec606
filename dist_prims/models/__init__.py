"""Models that the demo, the examples and the benchmarks train: ResNets, and a small GPT over a split sequence."""

from .gpt import GPT
from .resnet import ResNet, resnet18, resnet34, resnet50, resnet101, resnet152

__all__ = ["GPT", "ResNet", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
