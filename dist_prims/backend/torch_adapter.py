"""Choice of the adapter, the compiled module between the core and the torch of this process.

An adapter is found in one of three places, in this order:

1. in the package, for the release of this torch (2.13.0 and 2.13.1 share an adapter);
2. in the cache, compiled earlier for exactly this torch, this Python and these sources;
3. nowhere: it is compiled into the cache, which takes about a minute and needs a C++20 compiler. One process of the
   user on this machine compiles, the others wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import compile_native

__all__: list[str] = []

LIBRARIES = Path(__file__).parents[1] / "lib"
_NAME = "dist_prims._backend"
_TIME_TO_COMPILE = 1800  # seconds to wait for a process that compiles


@dataclass(frozen=True)
class Adapter:
    """The loaded module, its file, and why this file was taken."""

    module: Any
    file: Path
    reason: str


@functools.cache
def load() -> Adapter:
    """Load the adapter for this torch, and compile it first if there is none; ImportError with a remedy."""
    core = _core()
    if not core.exists():
        raise ImportError(f"{core} does not exist: {_remedy_without_core()}")
    ctypes.CDLL(str(core))  # by its path, so that an adapter in the cache need not find it
    own = _of_package()
    problem = f"the package has none for torch {torch.__version__}"
    if own.exists():
        try:
            return Adapter(_import(own), own, "part of the package")
        except ImportError as error:
            problem = f"that of the package does not load: {error}"
    cached = _in_cache()
    if cached.exists():
        return Adapter(_import(cached), cached, f"compiled at an earlier use, because {problem}")
    _compile(cached, problem)
    return Adapter(_import(cached), cached, f"compiled now, because {problem}")


def ensure() -> None:
    """Compile an adapter if there is none for this torch; ImportError with a remedy."""
    if not _exists():
        load()


def describe() -> str:
    """The adapter of this process and why it is taken, or why there is none. Compiles nothing.

    >>> describe().startswith("yes, by the adapter")
    True
    """
    if _core().exists() and not _exists():
        missing = compile_native.compiler_problem()
        later = f"none can be compiled: {missing}" if missing else "the first use compiles one, in about a minute"
        return f"no adapter for torch {torch.__version__} yet; {later}"
    try:
        adapter = load()
    except ImportError as error:
        return f"no: {error}"
    return f"yes, by the adapter {adapter.file} ({adapter.reason})"


def _exists() -> bool:
    return _of_package().exists() or _in_cache().exists()


def _core() -> Path:
    return LIBRARIES / compile_native.CORE


def _of_package() -> Path:
    return LIBRARIES / compile_native.adapter_folder(torch.__version__) / compile_native.adapter_file()


def _in_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    cache = (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "dist_prims" / "adapters"
    return cache / _digest() / compile_native.adapter_file()


def _import(file: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(file))
    spec = importlib.util.spec_from_file_location(_NAME, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[_NAME] = module
    return module


def _sources() -> Path:
    """The folder csrc: in the package if it was installed from a wheel, beside it in a checkout."""
    return next((folder for folder in (LIBRARIES / "csrc", LIBRARIES.parents[1] / "csrc") if folder.is_dir()), Path())


def _digest() -> str:
    """What an adapter depends on, as a name."""
    parts = [torch.__version__, torch.__file__, platform.machine(), compile_native.adapter_file()]
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in sorted(_sources().rglob("*.h")) + sorted(_sources().glob("torch/**/*.cpp")):
        digest.update(source.read_bytes())
    return f"torch{torch.__version__}-{digest.hexdigest()[:16]}"


def _compile(file: Path, problem: str) -> None:
    found = sorted(each.parent.name.removeprefix("torch") for each in LIBRARIES.glob("torch*/*.so"))
    others = f"or install a torch that the package has an adapter for ({', '.join(found)})" if found else ""
    if not _sources().joinpath("torch").is_dir():
        raise ImportError(
            f"no adapter between dist_prims and torch {torch.__version__}: {problem}, and the sources to compile one "
            "are not installed; install dist_prims again, from a wheel or from its source"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        raise ImportError(
            f"no adapter between dist_prims and torch {torch.__version__}: {problem}, and a compiled one cannot be "
            f"kept: {error}; set XDG_CACHE_HOME to a folder that is writable"
        ) from None
    with _alone(file.parent):
        if file.exists():  # another process has compiled it
            return
        if missing := compile_native.compiler_problem():
            raise ImportError(
                f"no adapter between dist_prims and torch {torch.__version__}: {problem}, and none can be compiled: "
                f"{missing}. Install g++ 10 or later (Debian: apt install g++), {others or 'or name another by CXX'}. "
                "What needs no compiled library works without it: schedules, and collectives over gloo"
            )
        print(
            f"dist_prims: compiling the adapter for torch {torch.__version__}, about a minute, once: {problem}",
            file=sys.stderr,
            flush=True,
        )
        start = time.monotonic()
        adapter = compile_native.adapter(_sources(), Path(torch.__file__).parent)
        with tempfile.TemporaryDirectory(prefix="dist_prims-") as objects:
            try:
                link = (f"-L{LIBRARIES}", *adapter.link_flags)
                one = compile_native.Library(file.name, adapter.sources, adapter.compile_flags, link)
                compile_native.build([one], file.parent, Path(objects), report=False)
            except compile_native.CompileError as error:
                raise ImportError(
                    f"no adapter between dist_prims and torch {torch.__version__}: {problem}, and compiling one "
                    f"failed. Report it if this torch is 2.11 or later{others and ', '}{others}:\n{error}"
                ) from error
        print(f"dist_prims: compiled in {time.monotonic() - start:.0f} s: {file}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes of this user from compiling into the folder; TimeoutError if one does not end."""
    deadline = time.monotonic() + _TIME_TO_COMPILE
    with (folder / "lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has held {lock.name} for {_TIME_TO_COMPILE} s, to compile an adapter; end it"
                    ) from None
                time.sleep(0.2)
            except OSError:  # a file system without locks: two may compile, the file appears whole or not at all
                break
        yield


def _remedy_without_core() -> str:
    if sys.platform != "linux":
        return f"the native libraries exist for Linux only, and this is {platform.system()}; schedules work everywhere"
    return (
        "dist_prims was installed without its native libraries; install the wheel for Linux, or build it: "
        "pip install --no-build-isolation --force-reinstall --no-deps <the source of dist_prims>"
    )
