"""Crash-safe checkpoints of the state of a job, which can be loaded on any number of ranks.

``if rank == 0: torch.save(model.state_dict(), path)`` loses everything if the process dies while it writes, does not
notice a file that has changed, and omits the rest of the state that determines the next step: the optimizer, the
position in the data, the random numbers of each rank, and state that only one rank has. Here a save has four steps:

1. All ranks compare what they are about to save, before anything is written.
2. Each rank writes its files into a folder that no manifest names, syncs them, and reports bytes and checksums.
3. Rank 0 writes the manifest and renames it to its final name. From then on the checkpoint exists.
4. Rank 0 removes old checkpoints and the files of unfinished saves.

A failure in any of these steps is raised on every rank, and earlier checkpoints are not changed until step 4.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...collectives.call import group_of
from . import randomness
from .all_or_none import READING, CheckpointError, DamagedCheckpointError, together
from .files import make_folder, put_text, sync_folder, write_tensors
from .manifest import Manifest, name_of, read_text, step_of, steps_in
from .plain_state import Target, is_collective, is_stream, plain, state_of, whole_number
from .reading import Reader
from .shards import Padded, agreed, describe, unpadded

__all__: list[str] = []


class Checkpoints:
    """The checkpoints of a job in ``directory``, which all ranks share; the last ``keep`` of them are kept.

    >>> import tempfile, torch
    >>> folder = tempfile.TemporaryDirectory()
    >>> weight = torch.zeros(2)
    >>> checkpoints = Checkpoints(folder.name, {"weight": weight})
    >>> checkpoints.restore()
    0
    >>> _ = checkpoints.save(10), weight.add_(1), checkpoints.restore()
    >>> weight, checkpoints.steps()
    (tensor([0., 0.]), [10])
    >>> folder.cleanup()

    The arguments map names to objects: modules, optimizers, other objects with ``state_dict`` and ``load_state_dict``,
    tensors (loaded in place), and generators of random numbers.

    - ``state``: the same on every rank; rank 0 writes it. If ``collective_state_dict`` of an object is True, as of a
      ZeroOptimizer and ShardedParameters, all ranks call its ``state_dict()``. Of a ShardedSampler or ShardedIterable
      the states of all ranks are saved, so it can continue on any number of ranks.
    - ``sharded``: each rank has some rows of every tensor; see ``shards`` for the split, and :class:`Padded`.
    - ``own``: different on each rank; it can be loaded on the same number of ranks only.

    The global random states of torch, NumPy, Python and CUDA are always saved.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        state: Mapping[str, Target],
        *,
        sharded: Mapping[str, Target | Padded] | None = None,
        own: Mapping[str, Target] | None = None,
        keep: int = 2,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"Checkpoints: keep={keep} must be at least 1")
        self.directory, self.keep = Path(directory), keep
        self.group = group_of(group, "Checkpoints")
        self._rank = self.group.rank()
        names = [*state, *(sharded or {}), *(own or {})]
        if len(set(names)) < len(names):
            raise ValueError(f"Checkpoints: {sorted(names)}: give each name once, in state, sharded or own")
        _refuse_others(
            {**state, **{name: unpadded(given)[0] for name, given in (sharded or {}).items()}, **(own or {})}
        )
        self._whole = {name: target for name, target in state.items() if not is_stream(target)}
        self._streams = {name: target for name, target in state.items() if is_stream(target)}
        self._sharded = dict(sharded or {})
        self._own = dict(own or {})
        self._refused: set[int] = set()  # steps whose checkpoint is damaged
        self._ours: set[int] = set()  # steps that this object has saved or restored

    def resize(self, group: dist.ProcessGroup | None = None) -> None:
        """Save and restore with the ranks of another group from now on, as after ``dist_prims.shrink`` or ``grow``.

        A save that failed has left the earlier checkpoints; files of it are removed by the next save.
        """
        self.group = group_of(group, "Checkpoints.resize")
        self._rank = self.group.rank()

    def steps(self) -> list[int]:
        """The steps of the checkpoints that this rank sees, the last one first."""
        return steps_in(os.listdir(self.directory)) if self.directory.is_dir() else []

    def save(self, step: int) -> Path:
        """Write a checkpoint, and return the path of its manifest; call it on every rank.

        The checkpoint has the state after ``step`` steps. When the method returns, it is on the disk.
        """
        operation = f"Checkpoints.save of step {step}"
        found = together(operation, lambda: self._request(step), self.group)
        _compare(operation, [asked for asked, _ in found])
        step, token = found[0][0]["step"], found[0][1]
        files: dict[str, Any] = {}

        def prepare() -> dict[str, Any]:
            files.update(self._files())
            return self._parts(files)

        parts = together(operation, prepare, self.group)
        sharded = {
            name: agreed(f"{operation}: sharded {name!r}", [each[name] for each in parts], unpadded(given)[1])
            for name, given in self._sharded.items()
        }
        folder = self.directory / f"step-{step}.{token}"
        try:
            written = together(operation, lambda: _write(folder, files), self.group)
            every = {name: about for each in written for name, about in each.items()}
            manifest = Manifest(step, self.group.size(), folder.name, every, sharded)
            together(operation, lambda: self._commit(manifest) if self._rank == 0 else None, self.group)
        except CheckpointError:  # no rank writes after this error
            if self._rank == 0 and not self._is_named(folder, step):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._ours.add(step)
        return self.directory / name_of(step)

    def restore(self) -> int:
        """Load the last intact checkpoint into all objects, and return its step, or 0 if there is none.

        Call it on every rank; the number of ranks may differ from that of the save. If a checkpoint is damaged, a
        warning names the file and all ranks use the one before it. Random states are restored, too; additional ranks
        get states derived from rank 0's.
        """
        operation = f"Checkpoints.restore from {self.directory}"
        found = together(operation, lambda: (self._names(), self.steps()), self.group, READING)
        _compare(operation, [names for names, _ in found])
        refusals = []
        for step in self._seen(operation, [steps for _, steps in found]):
            try:
                return self._restore(step, f"{operation}, step {step}")
            except DamagedCheckpointError as error:
                self._refused.add(step)
                refusals.append(str(error))
                together(
                    operation, functools.partial(self._warn, f"{error}; trying the checkpoint before it"), self.group
                )
        if refusals:
            raise DamagedCheckpointError(
                f"{operation}: rank {self._rank}: every checkpoint is damaged; to start over, use another directory. "
                + " ".join(refusals)
            )
        return 0

    def _seen(self, operation: str, by_rank: list[list[int]]) -> list[int]:
        """The steps that rank 0 sees, if these include the last step that any rank sees."""
        last = [max(steps, default=-1) for steps in by_rank]
        if max(last) == last[0]:
            return by_rank[0]
        steps = together(operation, self.steps, self.group, READING)[0]  # another job may have saved just now
        if max(steps, default=-1) < max(last):
            raise CheckpointError(
                f"{operation}: rank {last.index(max(last))} sees step {max(last)}, rank 0 "
                f"{max(steps, default='none')}; choose a directory that all ranks share"
            )
        return steps

    def _warn(self, words: str) -> None:
        """Warn on rank 0. If warnings are errors, all ranks fail, because the caller uses together()."""
        if self._rank == 0:
            warnings.warn(words, RuntimeWarning, stacklevel=4)  # the caller of restore()

    def _restore(self, step: int, operation: str) -> int:
        path = self.directory / name_of(step)
        text = together(operation, lambda: read_text(path) if self._rank == 0 else "", self.group, READING)[0]
        reader = Reader(self.directory, Manifest.parse(text, str(path)), self._rank, self.group.size())

        def read() -> None:
            reader.streams(self._streams)  # first: only their load compares them
            reader.whole(self._whole)
            reader.sharded(self._sharded)
            reader.own(self._own)
            reader.random()  # last: a load may draw random numbers

        together(operation, read, self.group, READING)
        together(operation, reader.load, self.group, READING)
        self._ours.add(step)
        return step

    def _names(self) -> dict[str, Any]:
        return {
            "state": sorted([*self._whole, *self._streams]),
            "sharded": {name: unpadded(self._sharded[name])[1] for name in sorted(self._sharded)},
            "own": sorted(self._own),
            "collective": sorted(name for name, target in self._whole.items() if is_collective(target)),
        }

    def _request(self, step: int) -> tuple[dict[str, Any], str]:
        """What this rank is about to save, and a random part for the name of the folder."""
        number = whole_number(step, "step")
        if self._rank == 0:
            self._refuse_to_go_back(number)
        return {"step": number, **self._names()}, secrets.token_hex(4)

    def _files(self) -> dict[str, Any]:
        """The contents of this rank's files.

        All ranks first call the collective ``state_dict()`` methods, in the order of names; rank 0 writes the results.
        """
        gathered = {name: state_of(self._whole[name]) for name in self._names()["collective"]}

        def states(targets: Mapping[str, Target]) -> dict[str, Any]:
            return {
                name: plain(name, gathered[name] if name in gathered else state_of(target))
                for name, target in targets.items()
            }

        mine = {"states": states(self._own), "random": randomness.capture()}
        files: dict[str, Any] = {f"rank-{self._rank}.pt": mine}
        if self._rank == 0:
            files["state.pt"] = states(self._whole)
        if self._streams:
            files[f"streams-{self._rank}.pt"] = states(self._streams)  # which all ranks read
        if self._sharded:
            files[f"shard-{self._rank}.pt"] = states(
                {name: unpadded(given)[0] for name, given in self._sharded.items()}
            )
        return files

    def _parts(self, files: Mapping[str, Any]) -> dict[str, Any]:
        return {name: describe(name, files[f"shard-{self._rank}.pt"][name]) for name in self._sharded}

    def _refuse_to_go_back(self, step: int) -> None:
        """ValueError if the directory has a later checkpoint: two runs there would replace each other's files."""
        if step < 0:
            raise ValueError(f"step {step} is negative; steps are counted from 0")
        there = [each for each in self.steps() if each not in self._refused]
        later = [each for each in there if each > step or (each == step and each not in self._ours)]
        if later:
            raise ValueError(
                f"{self.directory} has a checkpoint of step {later[0]}; restore() it first, or choose another directory"
            )

    def _commit(self, manifest: Manifest) -> None:
        for name, about in manifest.files.items():
            path = self.directory / manifest.folder / name
            if not path.exists() or path.stat().st_size != about["bytes"]:
                raise CheckpointError(
                    f"{path} of another rank is not visible here; choose a directory that all ranks share"
                )
        self._ours.add(manifest.step)  # if the next line fails, the step may exist or not, and may be saved again
        put_text(self.directory / name_of(manifest.step), manifest.text())
        self._refused.discard(manifest.step)
        with contextlib.suppress(OSError):  # the checkpoint exists; old files may stay
            self._clean()

    def _clean(self) -> None:
        """Remove all files of this class that the last checkpoints do not need."""
        needed: set[str] = set()
        unknown: set[int] = set()  # their manifest may be of another program or version
        old: list[Path] = []
        for step in self.steps():
            path = self.directory / name_of(step)
            try:
                folder = "" if step in self._refused else Manifest.parse(read_text(path), str(path)).folder
            except (DamagedCheckpointError, ValueError):
                unknown.add(step)
                continue
            if folder and len(needed) < self.keep:
                needed.add(folder)
            else:
                old.append(path)
        for path in old:
            path.unlink(missing_ok=True)
        for entry in self.directory.iterdir():
            of = step_of(entry.name)
            if of is not None and of not in unknown and entry.name not in needed:
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)

    def _is_named(self, folder: Path, step: int) -> bool:
        """Whether a manifest names the folder of a failed save: the save may have failed after the rename."""
        try:
            return folder.name in (self.directory / name_of(step)).read_text()
        except FileNotFoundError:
            return False
        except (OSError, ValueError):
            return True


def _refuse_others(targets: Mapping[str, Any]) -> None:
    for name, target in targets.items():
        stateful = callable(getattr(target, "state_dict", None)) and callable(getattr(target, "load_state_dict", None))
        if not stateful and not isinstance(target, torch.Tensor | torch.Generator):
            raise ValueError(
                f"Checkpoints: {name!r} is a {type(target).__name__}"
                + (", which belongs in sharded" if isinstance(target, Padded) else "")
                + "; give a tensor, a generator, or an object with state_dict and load_state_dict"
            )


def _write(folder: Path, files: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    make_folder(folder)
    about = {
        name: {**write_tensors(folder / name, content), "holds": sorted(content)} for name, content in files.items()
    }
    sync_folder(folder)
    return about


def _compare(operation: str, asked: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(asked):
        for what, value in each.items():
            if value != asked[0][what]:
                raise ValueError(
                    f"{operation}: ranks differ in {what}: rank 0 has {asked[0][what]}, rank {rank} has {value}; "
                    "give the same on every rank, after the same step"
                )
