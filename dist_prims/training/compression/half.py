"""Gradients sent in 16 bits and added in 32.

bfloat16 has the range of float32 and 8 bits of precision; float16 has 11 bits and ends at 65504, so it wants a
``GradScaler``: what is larger arrives as an infinity, on every rank.
"""

from __future__ import annotations

import torch

from .encoded_mean import EncodedMean

__all__: list[str] = []


class Half(EncodedMean):
    """Half the bytes of float32: each gradient is rounded once on its way to the sum, the mean once on its way back.

    >>> Half(torch.bfloat16)
    Half(dtype=torch.bfloat16, feedback=True)
    """

    options = ("dtype",)

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, feedback: bool = True) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"Half(dtype={dtype}): torch.float16 or torch.bfloat16")
        super().__init__(feedback=feedback)
        self.dtype = dtype

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self.dtype).view(torch.uint8)

    def decode(self, packed: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        return packed.view(self.dtype).to(dtype)
