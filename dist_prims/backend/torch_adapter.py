"""The adapter ``_backend``: the compiled module that connects the core, libdist_prims_core.so, to the installed torch.

The package contains adapters for some releases of torch (2.13.0 and 2.13.1 share one). If none fits, as after a build
without torch, the adapter is compiled when it is first used: see ``native_libraries.py``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import compile_native
from .native_libraries import LIBRARIES, NativeLibrary, core

__all__: list[str] = []

_NAME = "dist_prims._backend"


@dataclass(frozen=True)
class Adapter:
    """The loaded module, its file, and why this file was taken."""

    module: Any
    file: Path
    reason: str


@functools.cache
def load() -> Adapter:
    """Load the adapter for this torch. Compile it first if there is none. If both fail, ImportError with a remedy."""
    adapter = _adapter_library()
    ctypes.CDLL(str(core().path()))  # by its whole path: an adapter in the cache lies in another folder
    problem = "the package has none"
    if adapter.in_package.exists():
        try:
            return Adapter(_import(adapter.in_package), adapter.in_package, "part of the package")
        except ImportError as error:
            problem = f"the package's adapter does not load: {error}"
    when = "at an earlier use" if adapter.in_cache.exists() else "now"
    file = adapter.compiled(problem)  # the file in the cache, or a new one
    return Adapter(_import(file), file, f"compiled {when}, because {problem}")


def ensure() -> None:
    """Compile an adapter if there is none for this torch; ImportError with a remedy."""
    if not (core().exists() and _adapter_library().exists()):
        load()


def describe() -> str:
    """The adapter of this process and why it is taken, or why there is none. Compiles nothing."""
    for library in (core(), _adapter_library()):
        if not library.exists():
            return f"not yet, without {library.title}; {library.status()}"
    try:
        adapter = load()
    except ImportError as error:
        return f"no: {error}"
    return f"yes, by the adapter {adapter.file} ({adapter.reason})"


def _adapter_library() -> NativeLibrary:
    releases = sorted(path.parent.name.removeprefix("torch") for path in LIBRARIES.glob("torch*/*.so"))
    return NativeLibrary(
        f"the adapter for torch {torch.__version__}",
        f"{compile_native.adapter_folder(torch.__version__)}/{compile_native.adapter_file()}",
        lambda csrc: compile_native.adapter(csrc, Path(torch.__file__).parent),
        (torch.__version__, torch.__file__),
        f"or install a torch that the package has an adapter for ({', '.join(releases)})" if releases else "",
    )


def _import(file: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(file))
    spec = importlib.util.spec_from_file_location(_NAME, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[_NAME] = module
    return module
