"""A client of PMI-1, the protocol by which process managers connect the ranks they start: Flux, Hydra, gforker.

A rank inherits a socket, whose number ``PMI_FD`` says. Over it the rank puts keys into a store of the job, waits until
all ranks have done so, and gets what the others have put. A request is a line of ``key=value`` words and is answered by
one line (Flux RFC 13). An MPI library that is initialised in the same process speaks over the same socket; requests and
answers alternate, so both get their own answers as long as one speaks at a time.

A process manager takes a rank that ends without the request "finalize" for one that has crashed, and ends the others.
So a rank finalizes when it ends, unless an uncaught exception ends it; where MPI is in use, MPI does so.
"""

import atexit
import contextlib
import os
import select
import stat
import sys
import time

from .detect import Launcher

__all__ = ["Pmi", "connect"]

_ANSWERS = {
    "init": "response_to_init",
    "get_maxes": "maxes",
    "get_my_kvsname": "my_kvsname",
    "put": "put_result",
    "barrier_in": "barrier_out",
    "get": "get_result",
    "finalize": "finalize_ack",
}
_SECONDS_TO_FINALIZE = 5.0


class Pmi:
    """The exchange of texts over PMI. One for each process: no key may be put twice."""

    def __init__(self, launcher: Launcher, descriptor: int, deadline: float) -> None:
        assert launcher.size is not None
        self.rank, self.size = launcher.rank, launcher.size
        self._descriptor, self._rounds = descriptor, 0
        version = self._ask("init", deadline, pmi_version="1", pmi_subversion="1")
        if version.get("pmi_version", "1") != "1":
            raise RuntimeError(f"the process manager speaks PMI {version['pmi_version']}, and PMI 1 is needed")
        self._longest = int(self._ask("get_maxes", deadline)["vallen_max"]) - 2  # a mark, and C's final zero
        self._name = self._ask("get_my_kvsname", deadline)["kvsname"]
        atexit.register(self._finalize, os.getpid())

    def all_texts(self, text: str, deadline: float, awaited: str) -> list[str]:
        self._rounds += 1
        self._put(text.encode().hex(), deadline)
        self._ask("barrier_in", deadline, awaited)
        return [bytes.fromhex(self._get(rank, deadline)).decode() for rank in range(self.size)]

    def _finalize(self, of: int) -> None:
        failed, forked = hasattr(sys, "last_value"), os.getpid() != of
        if not (failed or forked or "mpi4py.MPI" in sys.modules):
            with contextlib.suppress(OSError, RuntimeError):  # TimeoutError is an OSError
                self._ask("finalize", time.monotonic() + _SECONDS_TO_FINALIZE)

    def _put(self, text: str, deadline: float) -> None:
        """Text that is longer than a value may be goes in pieces; a + in front of a piece says that one follows."""
        pieces = [text[start : start + self._longest] for start in range(0, len(text), self._longest)] or [""]
        for number, piece in enumerate(pieces):
            value = ("." if number == len(pieces) - 1 else "+") + piece
            self._ask("put", deadline, kvsname=self._name, key=self._key(self.rank, number), value=value)

    def _get(self, rank: int, deadline: float) -> str:
        text, mark, number = "", "+", 0
        while mark == "+":
            value = self._ask("get", deadline, kvsname=self._name, key=self._key(rank, number))["value"]
            text, mark, number = text + value[1:], value[:1], number + 1
        return text

    def _key(self, rank: int, piece: int) -> str:
        return f"dist_prims-{self._rounds}-{rank}-{piece}"

    def _ask(self, command: str, deadline: float, awaited: str = "the process manager", **words: str) -> dict[str, str]:
        request = " ".join([f"cmd={command}", *(f"{key}={value}" for key, value in words.items())])
        os.write(self._descriptor, f"{request}\n".encode())
        answer = self._line(deadline, awaited)
        found = dict(word.partition("=")[::2] for word in answer.split())
        if found.get("cmd") != _ANSWERS[command] or found.get("rc", "0") != "0":
            raise RuntimeError(f"the process manager answers {answer!r} to {request!r}")
        return found

    def _line(self, deadline: float, awaited: str) -> str:
        """Byte by byte: what follows the line is for another reader of the socket, such as MPI."""
        line, poll = b"", select.poll()
        poll.register(self._descriptor, select.POLLIN)
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"no sign of {awaited}")
            byte = os.read(self._descriptor, 1)
            if not byte:
                raise RuntimeError("the process manager has closed the socket of PMI_FD")
            line += byte
        return line.decode().strip()


_client: Pmi | None = None


def connect(launcher: Launcher, deadline: float) -> Pmi:
    """The client of this process; its socket is the one that the process manager has left open for it."""
    global _client
    if _client is None:
        _client = Pmi(launcher, _descriptor(launcher), deadline)
    return _client


def _descriptor(launcher: Launcher) -> int:
    said = os.environ.get("PMI_FD", "")
    try:
        if stat.S_ISSOCK(os.fstat(int(said)).st_mode):
            return int(said)
        wrong = f"PMI_FD={said} is no socket"
    except (ValueError, OSError) as error:
        wrong = f"PMI_FD={said}: {error}" if said else "PMI_FD is not set"
    raise RuntimeError(
        f"{launcher.name} started {launcher.size} ranks ({', '.join(launcher.evidence)}), but offers no PMI-1 to this "
        f"one: {wrong}. Remedy: leave the socket open where a script starts Python; under Flux, start with "
        "-o pmi=simple; or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank"
    )
