"""Gradients sent in 8 bits: each block of them as one scale and numbers from -127 to 127.

One scale for all would round the small layers of a bucket to nothing, so there is one for each block. Rounding to
nearest with error feedback is the better default; stochastic rounding is right on average without any memory.
"""

from __future__ import annotations

import torch

from .encoded_mean import EncodedMean

__all__: list[str] = []

_LARGEST = 127
_SMALLEST = {torch.float32: 1e-37, torch.float64: 1e-300}  # a scale below it has no reciprocal that is of use


class Int8(EncodedMean):
    """A quarter of the bytes of float32. ``block``: elements, at most, that share a scale.

    ``stochastic=True`` rounds up or down at random, with the value's fraction as probability, drawn from ``seed`` and
    the rank, so that a run can be repeated. A value that is not finite makes its block so. ``feedback``: what rounding
    has lost is added to the next gradient.

    >>> Int8(block=256).bytes_of(1000)
    1016
    """

    options = ("block", "stochastic", "seed")

    def __init__(self, block: int = 512, *, stochastic: bool = False, seed: int = 0, feedback: bool = True) -> None:
        if block < 1:
            raise ValueError(f"Int8(block={block}): a block has at least one element")
        super().__init__(feedback=feedback)
        self.block, self.stochastic, self.seed = block, stochastic, seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def reset(self) -> None:
        """Forget what was lost, and draw from the beginning."""
        super().reset()
        self._generators.clear()

    def width(self, count: int) -> int:
        """The elements of equal blocks, with little padding."""
        blocks = self._blocks(count)
        return blocks * -(-count // blocks)

    def bytes_of(self, count: int, dtype: torch.dtype = torch.float32) -> int:
        """The bytes of ``count`` elements in a message."""
        return self.width(count) + self._blocks(count) * dtype.itemsize

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        blocks = rows.view(len(rows), self._blocks(rows.shape[1]), -1)
        scale = blocks.abs().amax(2, keepdim=True) / _LARGEST
        scale.masked_fill_(scale < _SMALLEST[rows.dtype], 0.0)
        numbers = blocks * torch.where(scale > 0, 1 / scale, 0.0)  # scale is NaN where a value is
        if self.stochastic:
            numbers += torch.rand(
                numbers.shape, generator=self._generator(rows.device), dtype=rows.dtype, device=rows.device
            )
            numbers.floor_().clamp_(-_LARGEST, _LARGEST)
        else:
            numbers.round_()
        numbers.nan_to_num_(nan=0.0)  # a value without an int8 is marked by the scale
        parts = scale.view(len(rows), -1).view(torch.uint8), numbers.view_as(rows).to(torch.int8).view(torch.uint8)
        return torch.cat(parts, dim=1)

    def decode(self, packed: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        head = self._blocks(width) * dtype.itemsize
        scale = packed[:, :head].clone(memory_format=torch.contiguous_format).view(dtype)  # aligned for what it holds
        numbers = packed[:, head:].view(torch.int8).to(dtype)
        return numbers.view(len(packed), scale.shape[1], -1).mul_(scale.unsqueeze(2)).view(len(packed), width)

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            seed = self.seed + 1_000_003 * torch.distributed.get_rank()  # the errors of ranks must be independent
            self._generators[device] = torch.Generator(device).manual_seed(seed)
        return self._generators[device]
