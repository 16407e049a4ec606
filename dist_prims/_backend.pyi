"""The compiled part of :mod:`dist_prims.backend`."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

built_for: str

def instruction_set() -> str: ...
def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

class PrimsBackend:
    native: bool

    def __init__(
        self,
        *,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        make_engine: Callable[[str], Any],
        accelerator: Any,
        one_host: bool,
        slot_bytes: int,
        one_shot_bytes: int,
        group: str,
        ranks: str,
        dump: str,
    ) -> None: ...
    def pin(self, low: int, high: int, name: str, chunks: int, scratch: int, steps: Sequence[Any]) -> None: ...
    def all_reduce_(self, tensor: torch.Tensor, op: Any) -> None: ...
    def record(self) -> str: ...
