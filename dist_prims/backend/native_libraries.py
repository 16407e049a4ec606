"""The native libraries of this process: of the package, or compiled at first use.

A library is looked for in this order:

1. in the package, where ``pip`` or a wheel has put it;
2. in the cache, compiled earlier from exactly these sources;
3. if neither has it, it is compiled into the cache, which needs a C++20 compiler. One process of the user on this
   machine compiles, the others wait.

Wheels have all libraries. A build from source has those whose headers it has seen: pip's isolated build sees no torch,
and none is built where no compiler is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .._output import print_notice
from . import compile_native
from .compile_native import CORE, CompileError, Library

__all__: list[str] = []

LIBRARIES = Path(__file__).parents[1] / "lib"
_TIME_TO_COMPILE = 1800  # seconds to wait for a process that compiles
_INSTALL_COMPILER = "Install g++ 10 or later (Debian: apt install g++), or name another compiler by CXX"


@dataclass(frozen=True)
class NativeLibrary:
    """A library of the package, and how it is compiled where the package lacks it.

    Args:
        title: how messages name it.
        file: its path below the folder of libraries of the package.
        make: returns what to compile, for the folder of the sources; raises ImportError if headers are missing.
        key: what a compiled file depends on, besides the sources and the type of processor.
        alternative: what the user can do without a compiler, for the remedy of an error.
    """

    title: str
    file: str
    make: Callable[[Path], Library]
    key: tuple[str, ...] = ()
    alternative: str = ""

    @property
    def in_package(self) -> Path:
        return LIBRARIES / self.file

    @property
    def in_cache(self) -> Path:
        home = os.environ.get("XDG_CACHE_HOME", "")
        cache = (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "dist_prims" / "libraries"
        digest = hashlib.sha256("\n".join([platform.machine(), *self.key]).encode())
        for source in sorted(path for path in sources().rglob("*.*") if "tests" not in path.parts):
            digest.update(source.read_bytes())
        return cache / digest.hexdigest()[:16] / Path(self.file).name

    def exists(self) -> bool:
        """Whether the library need not be compiled."""
        return self.in_package.exists() or self.in_cache.exists()

    def path(self) -> Path:
        """The file of the library, compiled now if need be; ImportError with title and remedy."""
        return self.in_package if self.in_package.exists() else self.compiled("the package has none")

    def compiled(self, problem: str) -> Path:
        """The file in the cache, compiled now if need be. ``problem``: why the package's file is not used."""
        file = self.in_cache
        if not file.exists():
            self._compile(file, problem)
        return file

    def status(self) -> str:
        """What the first use will do if the library does not exist yet."""
        try:
            self.make(sources())
        except ImportError as error:  # headers are missing
            return str(error)
        missing = compile_native.compiler_problem()
        return f"none can be compiled: {missing}" if missing else "the first use compiles one, in about a minute"

    def _compile(self, file: Path, problem: str) -> None:
        """Compile into ``file``, unless another process does so meanwhile; ImportError with title and remedy."""
        # 1. What compilation needs: Linux, the sources, a folder that can be written.
        lack = f"{self.title}: {problem}"
        if sys.platform != "linux":
            raise ImportError(f"{lack}, and native libraries exist for Linux only; schedules work everywhere")
        if not sources().is_dir():
            raise ImportError(
                f"{lack}, nor its sources; install dist_prims again, from a wheel for Linux or its source"
            )
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=file.parent).close()
        except OSError as error:
            raise ImportError(
                f"{lack}, and a compiled one cannot be kept: {error}; set XDG_CACHE_HOME to a folder that is writable"
            ) from None
        # 2. One process compiles, if it has a compiler.
        with _alone(file.parent):
            if file.exists():  # another process has compiled it
                return
            if missing := compile_native.compiler_problem():
                raise ImportError(
                    f"{lack}, and none can be compiled: {missing}. {_INSTALL_COMPILER}"
                    f"{self.alternative and ', '}{self.alternative}. What needs no native library works without it: "
                    "schedules, and collectives over gloo"
                )
            self._compile_alone(file, lack)

    def _compile_alone(self, file: Path, lack: str) -> None:
        """Compile into ``file``, linked to the core; ``lack`` says why the library is compiled."""
        library = self.make(sources())
        folder = file.parent if self.file == CORE else core().path().parent
        print_notice(f"compiling {lack}; about a minute, once")
        start = time.monotonic()
        linked = Library(file.name, library.sources, library.compile_flags, (f"-L{folder}", *library.link_flags))
        with tempfile.TemporaryDirectory(prefix="dist_prims-") as objects:
            try:
                compile_native.build([linked], file.parent, Path(objects), report=False)
            except CompileError as error:
                raise ImportError(
                    f"{lack}, and compiling one failed. Report it if torch is 2.11 or later"
                    f"{self.alternative and ', '}{self.alternative}:\n{error}"
                ) from error
        print_notice(f"compiled in {time.monotonic() - start:.0f} s: {file}")


def core() -> NativeLibrary:
    """The library without torch, MPI and UCX, which all others need."""
    return NativeLibrary("the core of dist_prims", CORE, compile_native.core)


def sources() -> Path:
    """The folder csrc: in the package if it was installed, beside it in a checkout."""
    beside = LIBRARIES.parents[1] / "csrc"
    return beside if beside.is_dir() else LIBRARIES / "csrc"


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
                        f"another process has held {lock.name} for {_TIME_TO_COMPILE} s, to compile a library; end it"
                    ) from None
                time.sleep(0.2)
            except OSError:  # a file system without locks: two may compile, the file appears whole or not at all
                break
        yield
