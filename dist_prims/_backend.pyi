"""The compiled part of :mod:`dist_prims.backend`."""

from datetime import timedelta
from typing import Any

built_for: str

def instruction_set() -> str: ...

class PrimsBackend:
    native: bool

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, engine: Any, one_host: bool, slot_bytes: int
    ) -> None: ...
