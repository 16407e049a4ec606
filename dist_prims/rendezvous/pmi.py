"""Client of PMI-1, the protocol of process managers (Flux, Hydra, gforker) for connecting the ranks that they start.

A rank inherits a socket, whose descriptor number is in ``PMI_FD``. Over the socket the rank puts keys into a key-value
store of the job, waits in a barrier until all ranks have put theirs, and gets the values of the other ranks. A request
is a line of ``key=value`` words, and the answer is one line (Flux RFC 13). An MPI library that is initialised in the
same process uses the same socket. Requests and answers alternate, so each gets its own answers as long as the two do
not send at the same time.

A process manager regards a rank that exits without the request "finalize" as crashed, and kills the others. A rank
therefore finalizes at exit. Where MPI is in use, MPI finalizes. If an uncaught exception ends a rank, it requests
"abort": Hydra of MPICH 5.0 does not kill the others if it collects the exit status of a rank before it sees that the
socket of the rank is closed.
"""

import atexit
import contextlib
import os
import select
import stat
import sys
import time

from .deadline import until_output_is_read
from .detect_launcher import Launcher

__all__: list[str] = []

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
    """Text exchange over PMI. A process has one instance, because no key may be put twice."""

    def __init__(self, launcher: Launcher, descriptor: int, deadline: float) -> None:
        assert launcher.size is not None
        self.rank, self.size = launcher.rank, launcher.size
        self._descriptor, self._rounds = descriptor, 0
        version = self._ask("init", deadline, pmi_version="1", pmi_subversion="1")
        if version.get("pmi_version", "1") != "1":
            raise RuntimeError(f"rank {self.rank}: the process manager supports PMI {version['pmi_version']}, not 1")
        self._longest = int(self._ask("get_maxes", deadline)["vallen_max"]) - 2  # the mark and the terminating zero
        self._name = self._ask("get_my_kvsname", deadline)["kvsname"]
        atexit.register(self._end, os.getpid())

    def all_texts(self, text: str, deadline: float, awaited: str) -> list[str]:
        """See TextExchange."""
        self._rounds += 1
        self._put(text.encode().hex(), deadline)
        self._ask("barrier_in", deadline, awaited)
        return [bytes.fromhex(self._get(rank, deadline)).decode() for rank in range(self.size)]

    def _end(self, process: int) -> None:
        """At exit: finalize, or abort after an exception, if ``process`` is this process and no parent of it."""
        if os.getpid() != process:
            return
        with contextlib.suppress(OSError, RuntimeError):  # TimeoutError is an OSError
            if hasattr(sys, "last_value"):
                until_output_is_read()
                os.write(self._descriptor, b"cmd=abort exitcode=1\n")  # no answer comes
            elif "mpi4py.MPI" not in sys.modules:
                self._ask("finalize", time.monotonic() + _SECONDS_TO_FINALIZE)

    def _put(self, text: str, deadline: float) -> None:
        """Put a text, in several pieces if it is longer than a value may be.

        The last piece begins with a dot, the pieces before it with a plus sign.
        """
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
        """Send a request, and return the words of the answer by their keys."""
        request = " ".join([f"cmd={command}", *(f"{key}={value}" for key, value in words.items())])
        with contextlib.suppress(BrokenPipeError):  # then no answer comes
            os.write(self._descriptor, f"{request}\n".encode())
        answer = self._line(deadline, awaited)
        fields = dict(word.partition("=")[::2] for word in answer.split())
        if fields.get("cmd") != _ANSWERS[command] or fields.get("rc", "0") != "0":
            raise RuntimeError(f"rank {self.rank}: the process manager answers {answer!r} to {request!r}")
        return fields

    def _line(self, deadline: float, awaited: str) -> str:
        """Read a line byte by byte: what follows the line is for another reader of the socket, such as MPI."""
        line, poll = b"", select.poll()
        poll.register(self._descriptor, select.POLLIN)
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"no sign of {awaited}")
            byte = os.read(self._descriptor, 1)
            if not byte:
                raise RuntimeError(f"rank {self.rank}: the process manager has closed the socket of PMI_FD")
            line += byte
        return line.decode().strip()


_client: Pmi | None = None


def connect(launcher: Launcher, deadline: float) -> Pmi:
    """Return the PMI client of this process, which uses the socket inherited from the process manager."""
    global _client
    if _client is None:
        _client = Pmi(launcher, _descriptor(launcher), deadline)
    return _client


def _descriptor(launcher: Launcher) -> int:
    text = os.environ.get("PMI_FD", "")
    try:
        if stat.S_ISSOCK(os.fstat(int(text)).st_mode):
            return int(text)
        problem = f"PMI_FD={text} is not a socket"
    except (ValueError, OSError) as error:
        problem = f"PMI_FD={text}: {error}" if text else "PMI_FD is not set"
    raise RuntimeError(
        f"{launcher.name} started {launcher.size} ranks ({', '.join(launcher.evidence)}), but offers no PMI-1 to this "
        f"rank: {problem}. Remedy: leave the socket open where a script starts Python; under Flux, start with "
        "-o pmi=simple; or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank"
    )
