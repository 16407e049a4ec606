"""Reader of one checkpoint for one rank: everything is read and compared before any object is changed.

The reader compares shapes and dtypes of tensors, names in modules, and parameters of optimizers. Other errors of an
object's ``load_state_dict`` occur after the objects before it have been loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from . import randomness
from .compare import refuse_other
from .files import read_tensors
from .manifest import Manifest
from .plain_state import Target, load
from .shards import Padded, join, unpadded

__all__: list[str] = []


class Reader:
    """Collects states from intact files; :meth:`load` then loads them into the objects."""

    def __init__(self, directory: Path, manifest: Manifest, rank: int, size: int) -> None:
        self._directory, self._manifest, self._rank, self._size = directory, manifest, rank, size
        self._loads: list[Callable[[], None]] = []
        self._files: dict[str, Any] = {}

    def _file(self, name: str) -> Any:
        if name not in self._files:  # each is hashed once
            path = self._manifest.check(self._directory, name)
            self._files[name] = read_tensors(path, lazily=name.startswith("shard"))
        return self._files[name]

    def _add(self, name: str, target: Target, state: Any) -> None:
        refuse_other(name, target, state)
        self._loads.append(functools.partial(load, name, target, state))

    def random(self) -> None:
        mine = self._rank < self._manifest.ranks
        state = self._file(f"rank-{self._rank if mine else 0}.pt")["random"]
        again = randomness.restore if mine else functools.partial(randomness.derive, rank=self._rank)
        self._loads.append(functools.partial(again, state))

    def whole(self, targets: Mapping[str, Target]) -> None:
        if targets:
            _has("state", self._manifest.files["state.pt"]["holds"], targets)
        for name, target in targets.items():
            self._add(name, target, self._file("state.pt")[name])

    def streams(self, targets: Mapping[str, Target]) -> None:
        for name, target in targets.items():
            _has("streams", self._manifest.files.get("streams-0.pt", {"holds": []})["holds"], [name])
            states = [self._file(f"streams-{rank}.pt")[name] for rank in range(self._manifest.ranks)]
            self._loads.append(functools.partial(load, name, target, states))

    def sharded(self, targets: Mapping[str, Target | Padded]) -> None:
        _has("sharded", self._manifest.sharded, targets)
        for name, given in targets.items():
            target, rows = unpadded(given)
            about = self._manifest.sharded[name]
            if about["padded"] != rows:
                raise ValueError(
                    f"sharded {name!r} was saved with Padded rows={about['padded']}, and is loaded with rows={rows}; "
                    "make it as it was saved"
                )
            self._add(name, target, join(name, about, self._rank, self._size, functools.partial(self._shard, name)))

    def _shard(self, name: str, rank: int) -> Any:
        return self._file(f"shard-{rank}.pt")[name]

    def own(self, targets: Mapping[str, Target]) -> None:
        if targets and self._manifest.ranks != self._size:
            raise ValueError(
                f"{', '.join(map(repr, targets))}: own= was saved by {self._manifest.ranks} ranks, and this group has "
                f"{self._size}; use state= or sharded= for what any number of ranks loads, or start as many ranks"
            )
        for name, target in targets.items():
            states = self._file(f"rank-{self._rank}.pt")["states"]
            _has("own", states, [name])
            self._add(name, target, states[name])

    def load(self) -> None:
        for act in self._loads:
            act()


def _has(part: str, there: Collection[str], wanted: Iterable[str]) -> None:
    missing = sorted(set(wanted) - set(there))
    if missing:
        raise ValueError(
            f"{', '.join(map(repr, missing))} not in the {part} of this checkpoint, which has "
            f"{', '.join(map(repr, sorted(there))) or 'nothing'}; load only what was saved"
        )
