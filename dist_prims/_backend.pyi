"""The compiled part of :mod:`dist_prims.backend`."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

built_for: str

def instruction_set() -> str: ...
def all_reduce(tensor: Any, op: Any, group: Any, /) -> bool: ...
def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

class IncrementalTensor:
    def put(self, number: int, view: torch.Tensor, part: torch.Tensor, factor: float) -> bool: ...
    def all_reduce(self, ahead: bool) -> dist.Work: ...
    def is_shown(self) -> bool: ...
    def held(self) -> int: ...
    def forget(self) -> None: ...

class SignedStore(dist.Store):
    def __init__(self, store: dist.Store, key: bytes) -> None: ...

class NativeSchedule:
    def __init__(self, told: Any) -> None: ...

class PrimsBackend:
    spans_hosts: bool
    transport: str
    options: Any

    def __init__(
        self, *, store: Any, rank: int, size: int, timeout: timedelta, setup: Any, ended: Callable[[], int]
    ) -> None: ...
    def ended(self) -> list[int]: ...
    def algorithm(self, nbytes: int, collective: str = ..., root: int = ...) -> str: ...
    def pin(self, collective: str, text: str, make: Callable[[int], Sequence[Any]] | None) -> None: ...
    def run_call(
        self,
        *,
        collective: str,
        schedule: NativeSchedule | None,
        inputs: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor | None],
        counts: Sequence[int],
        op: Any,
        root: int,
        is_even: bool,
        check: Callable[[], None] | None,
        async_op: bool,
    ) -> dist.Work: ...
    def incremental_reduce(
        self, tensor: torch.Tensor, budget: int, before: IncrementalTensor | None
    ) -> IncrementalTensor | None: ...
    def record(self) -> str: ...
