"""A stand-in for torchcomms, with the part of its published interface by which it calls a backend in Python.

PyPI's torchcomms 0.0.1 is a stub. The stand-in follows the sources of August 2026: ``TorchCommPy.cpp`` (what a program
calls), ``PyTorchCommBackend.hpp`` (what is passed on to a backend in Python, and what is not) and
``TorchCommFactory.cpp`` (how a communicator is made).
"""

from __future__ import annotations

import importlib
import re
import sys
from datetime import timedelta
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

# The calls that reach a method of the backend with the same parameters, of which the last is async_op.
_PASSED_ON = re.compile(
    "send|recv|broadcast|barrier|(all_)?reduce|scatter|gather|(all_gather|reduce_scatter)(_v|_single)?"
    "|all_to_all((_v)?_single)?"
)
_backends: dict[str, type] = {}


def load() -> Any:
    """Return torchcomms if it is installed and no stub, else this stand-in, which then has the name torchcomms."""
    try:
        module: Any = importlib.import_module("torchcomms")
    except ImportError:
        module = None
    if not hasattr(module, "TorchCommBackend"):
        module = sys.modules["torchcomms"] = sys.modules[__name__]
    importlib.import_module("dist_prims.integrations.torchcomms")  # as torchcomms does for the entry point
    return module


class RedOpType(Enum):
    SUM = auto()
    PRODUCT = auto()
    MIN = auto()
    MAX = auto()
    BAND = auto()
    BOR = auto()
    BXOR = auto()
    PREMUL_SUM = auto()
    AVG = auto()


class ReduceOp:
    """It has a type. A backend in Python cannot read the factor of a PREMUL_SUM."""

    SUM: ReduceOp
    MAX: ReduceOp
    AVG: ReduceOp

    def __init__(self, kind: RedOpType) -> None:
        self.type = kind

    @staticmethod
    def PREMUL_SUM(factor: Any) -> ReduceOp:
        return ReduceOp(RedOpType.PREMUL_SUM)


for _kind in RedOpType:
    if _kind != RedOpType.PREMUL_SUM:
        setattr(ReduceOp, _kind.name, ReduceOp(_kind))


class ReconfigureOptions:
    def __init__(self, uuid: int, init_handles: Any, timeout: timedelta | None = None, hints: Any = None) -> None:
        self.uuid, self.init_handles, self.timeout, self.hints = uuid, init_handles, timeout, hints


class TorchCommBackend:
    """The base class of a backend in Python, which torchcomms makes without arguments."""


class TorchWork:
    """Of a call: done if the backend has returned None, else when its ``wait()`` has returned."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> None:
        if self._result is not None:
            self._result.wait()
            self._result = None

    def is_completed(self) -> bool:
        return self._result is None


class TorchComm:
    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        if not _PASSED_ON.fullmatch(name):
            raise AttributeError(name)
        return lambda *arguments: TorchWork(getattr(self._backend, name)(*arguments))

    def get_backend_impl(self) -> Any:
        return self._backend

    def get_rank(self) -> int:
        return int(self._backend.get_rank())

    def get_size(self) -> int:
        return int(self._backend.get_size())

    def get_name(self) -> str:
        return str(self._backend.get_comm_name())

    def get_backend(self) -> str:
        return str(self._backend.get_backend_name())

    def set_timeout(self, timeout: timedelta) -> None:
        self._backend.set_timeout(timeout)

    def split(self, ranks: list[int], name: str) -> TorchComm | None:
        child = self._backend.split(ranks, name, SimpleNamespace(hints={}, timeout=timedelta(seconds=600)))
        return None if child is None else TorchComm(child)

    def finalize(self) -> None:
        self._backend.finalize()


def register_backend(name: str, backend_class: type) -> None:
    _backends.setdefault(name, backend_class)


def new_comm(
    backend: str, device: Any, name: str, *, timeout: timedelta = timedelta(seconds=600), store: Any = None
) -> TorchComm:
    made: Any = _backends[backend]()
    made.init(device, name, SimpleNamespace(store=store, timeout=timeout, hints={}, enable_reconfigure=False))
    return TorchComm(made)
