"""The registers by which the survivors of a group agree: a record of each rank, and decisions.

A *record* is a text that only its rank replaces. A *decision* has a key, and the first value that a rank proposes for
the key stands. On one host the registers are a log in the shared memory of the group (``csrc/shm/shared_log.h``), which
lasts as long as one of its ranks. Between hosts several ranks serve them: :class:`.quorum.QuorumRegisters`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from ..errors import CommError

__all__: list[str] = []


class Registers(Protocol):
    """The records and decisions of one agreement."""

    def announce(self, text: str) -> None:
        """Replace the record of this rank."""

    def read(self) -> tuple[Mapping[int, str], Mapping[str, str]]:
        """Return the records by rank, and the decisions by key: at least those that stood before the call."""

    def decide(self, key: str, value: str) -> str:
        """Propose a value for a key; return the value that stands."""

    def close(self) -> None:
        """Close the connections to servers, if there are any."""


class SharedRegisters:
    """The registers of one agreement, in the shared memory of a group on one host.

    An entry of the log has a rank, and a text that is JSON: ``[agreement, record]``, or ``[agreement, key, value]`` for
    a proposal. All ranks read the entries in the same order. The last record of a rank counts, and the first value of a
    key. ``backend``: of the group, which may have ended.
    """

    def __init__(self, backend: Any, agreement: str) -> None:
        self._backend, self._agreement = backend, agreement

    def announce(self, text: str) -> None:
        self._append(self._agreement, text)

    def read(self) -> tuple[Mapping[int, str], Mapping[str, str]]:
        records: dict[int, str] = {}
        decisions: dict[str, str] = {}
        for rank, text in self._backend.read_log():
            match json.loads(text):
                case [self._agreement, record]:
                    records[rank] = record
                case [self._agreement, key, value]:
                    decisions.setdefault(key, value)
        return records, decisions

    def decide(self, key: str, value: str) -> str:
        _, decisions = self.read()
        if key not in decisions:
            self._append(self._agreement, key, value)
            _, decisions = self.read()  # another rank may have proposed before
        return decisions[key]

    def close(self) -> None:
        """Do nothing: the memory belongs to the group."""

    def _append(self, *parts: str) -> None:
        try:
            self._backend.append_to_log(json.dumps(parts))
        except ValueError as error:  # the log is full
            raise CommError(f"the group cannot be repaired any more: {error}") from error
