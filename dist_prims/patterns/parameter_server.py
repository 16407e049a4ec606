"""Parameter server: one rank keeps the parameters, the others send it gradients asynchronously.

In synchronous training every step is as slow as the slowest rank. Here a worker sends its gradient, gets the newest
parameters back and continues; the server takes the next gradient from any rank. The price is staleness: the parameters
have been updated since the gradient was computed. The server counts staleness and can bound it: it answers a worker
that is more than ``staleness`` gradients ahead of the slowest one only after the slowest has sent its gradient. With
``staleness=0`` the server waits for the gradients of all workers and applies their mean, added in rank order, in one
step: synchronous SGD, with the same bits in each run.

::

    worker 1  gradient 1 ──┐        ┌── parameters, version 1       gradient 3 ──┐
    server                 apply 1 ─┘        apply 2 ─┐                          apply 3, staleness 1
    worker 2       gradient 2 ───────────────┘        └── parameters, version 2

Messages are on the CPU, so the group needs a backend for it: "dist_prims", gloo, "cpu:gloo,cuda:nccl".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..agreement import gather_values
from ..collectives.call import group_of
from ..collectives.flat import cut
from ..errors import CommError, MismatchError
from ..training.gradients.initial_sync import broadcast_coalesced, check_same_model

__all__ = ["ParameterServer", "Report", "Worker"]

_GRADIENT, _DONE, _FAILED = range(3)
_NO_VERSION = -1  # the server's answer when it has failed


@dataclass
class Report:
    """The report of a server: its steps, the gradients of each worker, the number of gradients by staleness, and the
    workers that failed.

    >>> report = Report(steps=3, gradients=Counter({1: 2, 2: 1}), staleness=Counter({0: 2, 1: 1}))
    >>> report.gradients.total(), max(report.staleness)
    (3, 1)
    """

    steps: int = 0
    gradients: Counter[int] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)


class ParameterServer:
    """The server, on rank ``server`` of the group, with model and optimizer; all other ranks make a :class:`Worker`.

    >>> model = torch.nn.Linear(2, 1)
    >>> server = ParameterServer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> server.serve()  # no worker in a group of one
    Report(steps=0, gradients=Counter(), staleness=Counter(), failed=[])

    ``staleness``: the number of gradients that a worker may be ahead of the slowest; None: no bound. With n workers and
    a bound, a gradient is applied at most (n - 1) (2 staleness + 1) steps after its parameters were read.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None = None,
        *,
        server: int = 0,
        staleness: int | None = None,
    ) -> None:
        self._group = group_of(group, "ParameterServer")
        self._optimizer, self._bound = optimizer, staleness
        self._parameters = _join(model, self._group, server, _Role(True, server, staleness))
        self._incoming, self._outgoing = _Packet(self._parameters), _Packet(self._parameters)
        self._waiting: dict[int, list[torch.Tensor | None]] = {}  # workers that have no answer yet, and their gradients
        self._present = {rank for rank in range(self._group.size()) if rank != server}

    def serve(self) -> Report:
        """Answer workers until all have left.

        If a worker dies, the server raises PeerDiedError (backend "dist_prims") or gloo's error of a closed connection,
        and the model keeps its last values. An error of the optimizer is raised after all workers have been notified.
        """
        report = Report()
        while self._present:
            worker, kind, seen = self._receive()
            try:
                ready = self._take(worker, kind, seen, report)
                values = self._outgoing.of_values() if ready else self._outgoing.flat
            except Exception:
                with suppress(RuntimeError):  # the error here is raised, not that of the report
                    self._dismiss()
                raise
            for each in ready:
                del self._waiting[each]
                self._send(each, torch.tensor([report.steps]))
                self._send(each, values)
        return report

    def _receive(self) -> tuple[int, int, int]:
        """Receive from any worker: its rank, the kind of the message, and the version of its parameters."""
        head = torch.empty(2, dtype=torch.int64)
        worker = dist.get_group_rank(self._group, _any_source(head, self._group))
        kind, seen = head.tolist()
        if kind == _GRADIENT:
            dist.recv(self._incoming.flat, group=self._group, group_src=worker)
        else:
            self._present.remove(worker)
        return worker, kind, seen

    def _send(self, worker: int, message: torch.Tensor) -> None:
        dist.send(message, group=self._group, group_dst=worker)

    def _take(self, worker: int, kind: int, seen: int, report: Report) -> list[int]:
        """Handle a message, and return the workers to answer: in rounds all of them, otherwise those that are not too
        far ahead of the slowest."""
        if kind == _GRADIENT:
            report.gradients[worker] += 1
            report.staleness[report.steps - seen] += 1
            self._waiting[worker] = self._incoming.gradients()
            if self._bound != 0:
                self._step([self._waiting[worker]], report)
        report.failed += [worker] * (kind == _FAILED)
        if self._bound == 0:
            if not self._waiting or self._waiting.keys() != self._present:
                return []
            self._step([self._waiting[each] for each in sorted(self._waiting)], report)
        slowest = min((report.gradients[each] for each in self._present), default=0)
        most = math.inf if self._bound is None else slowest + self._bound
        return [each for each in sorted(self._waiting) if report.gradients[each] <= most]

    def _dismiss(self) -> None:
        """Report this rank's failure as the next answer to every worker."""
        last = torch.tensor([_NO_VERSION])
        for worker in sorted(self._waiting):
            self._send(worker, last)
        self._present -= self._waiting.keys()
        self._waiting.clear()
        while self._present:
            worker, kind, _ = self._receive()
            if kind == _GRADIENT:
                self._send(worker, last)
                self._present.remove(worker)

    def _step(self, gradients: Sequence[Sequence[torch.Tensor | None]], report: Report) -> None:
        """Step with the mean, added in rank order; a missing gradient of a worker counts as zero."""
        for parameter, given in zip(self._parameters, zip(*gradients, strict=True), strict=True):
            there = [each / len(gradients) for each in given if each is not None]
            parameter.grad = sum(there[1:], there[0]).to(parameter.device) if there else None
        self._optimizer.step()
        report.steps += 1


class Worker:
    """A context for the training loop on every rank but the server's; :meth:`step` replaces that of an optimizer.

        with Worker(model) as worker:
            for x, y in batches:
                loss(model(x), y).backward()
                worker.step()

    Ranks may have uneven numbers of batches. The context reports its end to the server, also after an error; it can be
    entered once. :meth:`step` raises CommError if the server has failed. Buffers are not sent.

    >>> import dist_prims
    >>> def train():
    ...     model = torch.nn.Linear(2, 1)
    ...     if dist.get_rank() == 0:
    ...         return ParameterServer(model, torch.optim.SGD(model.parameters(), lr=0.1)).serve().steps
    ...     with Worker(model) as worker:
    ...         for _ in range(3):
    ...             model(torch.ones(4, 2)).mean().backward()
    ...             worker.step()
    ...     return worker.version
    >>> dist_prims.spawn(train, 2, timeout=60)
    [3, 3]
    """

    def __init__(self, model: torch.nn.Module, group: dist.ProcessGroup | None = None, *, server: int = 0) -> None:
        self._group, self._server = group_of(group, "Worker"), server
        self._parameters = _join(model, self._group, server, _Role(False, server, None))
        self._looks = [(each.shape, each.dtype) for each in self._parameters]
        self._bulk = _Packet(self._parameters)
        self._sending = self._left = False  # a message is incomplete; the server expects no message
        self.version = 0  # the number of server steps that the parameters contain

    def __enter__(self) -> Worker:
        self._check_there()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        left, self._left = self._left, True
        if left:
            return
        if kind is None:
            self._send(torch.tensor([_DONE, 0]))
        elif not (self._sending or issubclass(kind, CommError)):
            with suppress(RuntimeError):  # the error here is raised, not that of the report
                self._send(torch.tensor([_FAILED, 0]))

    def step(self) -> None:
        """Send the gradients, take the newest parameters, and zero the gradients."""
        self._check_there()
        self._check_unchanged()
        gradients = self._bulk.of_gradients()
        self._sending = True
        self._send(torch.tensor([_GRADIENT, self.version]))
        self._send(gradients)
        version = torch.empty(1, dtype=torch.int64)
        dist.recv(version, group=self._group, group_src=self._server)
        if int(version) == _NO_VERSION:
            self._left = True
            raise CommError(
                f"rank {self._group.rank()}: Worker: the server, rank {self._server}, has failed; see its "
                f"error. The parameters of this rank are those after its step {self.version}"
            )
        dist.recv(self._bulk.flat, group=self._group, group_src=self._server)
        self._sending = False
        self.version = int(version)
        with torch.no_grad():
            for parameter, value in zip(self._parameters, self._bulk.values(), strict=True):
                parameter.copy_(value)
                parameter.grad = None

    def _check_there(self) -> None:
        if self._left:
            raise ValueError(
                f"rank {self._group.rank()}: Worker: this worker has left the server; make a new Worker, and a new "
                "ParameterServer on the server's rank"
            )

    def _check_unchanged(self) -> None:
        for parameter, look in zip(self._parameters, self._looks, strict=True):
            if (parameter.shape, parameter.dtype) != look:
                raise ValueError(
                    f"rank {self._group.rank()}: Worker: a parameter has shape {tuple(parameter.shape)} and "
                    f"{parameter.dtype}; when the Worker was made it had {tuple(look[0])} and {look[1]}"
                )
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ValueError(
                    f"rank {self._group.rank()}: Worker: a parameter of shape {tuple(parameter.shape)} has a sparse "
                    "gradient; make its layer with sparse=False"
                )

    def _send(self, message: torch.Tensor) -> None:
        dist.send(message, group=self._group, group_dst=self._server)


class _Packet:
    """A message of parameters or gradients of any dtype; its first bytes say which of them are present."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self.flat = torch.zeros(len(parameters) + sum(each.nbytes for each in parameters), dtype=torch.uint8)
        self._there, *self._places = cut(self.flat, [len(parameters), *(each.nbytes for each in parameters)])

    def of_values(self) -> torch.Tensor:
        return self._of([each.detach() for each in self._parameters])

    def of_gradients(self) -> torch.Tensor:
        return self._of([each.grad for each in self._parameters])

    def values(self) -> list[torch.Tensor]:
        pieces = zip(self._places, self._parameters, strict=True)
        return [place.clone().view(each.dtype).view(each.shape) for place, each in pieces]  # cloned: aligned

    def gradients(self) -> list[torch.Tensor | None]:
        return [value if there else None for value, there in zip(self.values(), self._there.tolist(), strict=True)]

    def _of(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        self._there.copy_(torch.tensor([each is not None for each in tensors], dtype=torch.uint8))
        for place, each in zip(self._places, tensors, strict=True):
            if each is not None:
                place.copy_(each.contiguous().view(-1).view(torch.uint8))
        return self.flat


def _any_source(head: torch.Tensor, group: dist.ProcessGroup) -> int:
    source: int = dist.recv(head, group=group)
    return source


class _Role(NamedTuple):
    """The role of a rank."""

    serves: bool
    server: int
    staleness: int | None

    def __str__(self) -> str:
        return f"a {'ParameterServer' if self.serves else 'Worker'} with server={self.server}"


def _join(model: torch.nn.Module, group: dist.ProcessGroup, server: int, role: _Role) -> list[torch.nn.Parameter]:
    """Check that all ranks have the same model and server; copy the server's parameters to all."""
    found: list[Any] = gather_values(tuple(role), group)
    roles = [_Role(*each) for each in found]
    for rank, each in enumerate(roles):
        begin = f"rank {group.rank()}: ParameterServer: rank {rank} makes {each}"
        if not 0 <= each.server < group.size():
            raise ValueError(f"{begin}; the ranks of the group are 0 to {group.size() - 1}")
        if each.staleness is not None and each.staleness < 0:
            raise ValueError(f"{begin} and staleness={each.staleness}; it must be 0 or more, or None for no bound")
        if each.server != roles[0].server or each.serves != (rank == each.server):
            raise MismatchError(
                f"{begin}, rank 0 {roles[0]}; nothing was sent. Give the same server on all ranks; that rank makes the "
                "ParameterServer, every other rank a Worker"
            )
    check_same_model("ParameterServer", [], model.named_parameters(), group)
    parameters = [*model.parameters()]
    broadcast_coalesced([each.detach() for each in parameters], server, group)
    return parameters
