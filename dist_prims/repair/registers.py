"""What the survivors of a group agree by: a record of each rank, and decisions of which the first value stands.

On one host both are in the shared memory of the group (``csrc/shm/shared_log.h``), which lasts as long as one of its
ranks. Between hosts they are in several stores, see :mod:`quorum`.
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
        """The records by rank, and the decisions by key. A decision that stood before the call is among them."""

    def decide(self, key: str, value: str) -> str:
        """Propose a value; return the one that stands."""

    def close(self) -> None:
        """Release what the use of the registers needs."""


class SharedRegisters:
    """Registers in the shared memory of a group on one host. ``backend`` is the group's, ended or not.

    A text in the log is the agreement that it belongs to, and a record, or a key and a value. The first value of a key
    stands.
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
            _, decisions = self.read()
        return decisions[key]

    def _append(self, *parts: str) -> None:
        try:
            self._backend.append_to_log(json.dumps(parts))
        except ValueError as error:
            raise CommError(f"the group cannot be repaired any more: {error}; start the job again") from error

    def close(self) -> None:
        """The memory belongs to the group."""
