"""Checkpoints of a whole job by torch.distributed.checkpoint (DCP): crash-safe, and readable on any number of ranks.

DCP shares out over the ranks what all of them have, and reads a DTensor in any other split. Added here: a checkpoint
exists completely or not at all, damage is noticed, ranks that differ are named, and streams and random states go on.

A save writes into the folder ``.step-120.90b7e35d``: DCP the tensors, each rank the rest of its state as ``rank-0.pt``.
When all ranks have written, rank 0 adds the checksums and renames the folder to ``step-120``: the checkpoint exists.
"""

from __future__ import annotations

import copy
import functools
import io
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from ..agreement import check_lists, gather_values
from ..collectives.call import group_of
from . import randomness
from .data import ShardedIterable, ShardedSampler
from .group_duplicates import duplicate
from .stateful import check_alike, load, state_of

__all__ = ["CheckpointError", "Checkpoints"]

_CHECKSUMS = "checksums.txt"  # a line for each file: its name, length and CRC-32


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read, on this rank or another. Earlier checkpoints are unchanged.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> checkpoints = Checkpoints(folder.name, {})
    >>> checkpoints.save(10)
    >>> try:
    ...     checkpoints.save(9)
    ... except CheckpointError as error:
    ...     print(str(error).replace(folder.name, "folder"))
    Checkpoints.save of step 9: rank 0: ValueError: folder has step 10; restore() it, or choose another directory
    >>> folder.cleanup()
    """


class Checkpoints:
    """The checkpoints of a job in ``directory``, which all ranks share; the last ``keep`` of them are kept.

    >>> import tempfile
    >>> folder, weight = tempfile.TemporaryDirectory(), torch.zeros(2)
    >>> checkpoints = Checkpoints(folder.name, {"weight": weight})
    >>> checkpoints.save(10), weight.add_(1).tolist(), checkpoints.restore(), checkpoints.steps(), weight
    (None, [1.0, 1.0], 10, [10], tensor([0., 0.]))
    >>> folder.cleanup()

    - ``state``: modules, optimizers, other objects with ``state_dict`` and ``load_state_dict``; tensors, and
      dictionaries of tensors, loaded in place. A tensor is the same on each rank that has it, or a DTensor. Of the
      buffers of a module the lowest rank's are saved; of a ShardedSampler or ShardedIterable the states of all ranks.
    - ``own``: objects whose state differs by rank, and generators. Only the same number of ranks can load them.
    - ``group``: the ranks that save and restore together; by default all.

    The random states of torch, NumPy, Python and CUDA are always saved; ranks that were not there derive theirs.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        state: Mapping[str, Any],
        *,
        own: Mapping[str, Any] | None = None,
        keep: int = 2,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.directory, self.keep, self._own = Path(directory), keep, dict(sorted((own or {}).items()))
        if keep < 1 or state.keys() & self._own.keys():
            raise ValueError(f"Checkpoints: keep={keep} must be at least 1, and a name in state or in own, not in both")
        for name, target in {**state, **self._own}.items():
            in_place = torch.Tensor | (torch.Generator if name in self._own else dict)
            if not hasattr(target, "load_state_dict") and not isinstance(target, in_place):
                raise ValueError(
                    f"Checkpoints: {name!r} is a {type(target).__name__}; give an object with a state_dict"
                )
        self._streams = {k: v for k, v in sorted(state.items()) if isinstance(v, ShardedSampler | ShardedIterable)}
        # Objects whose state_dict() communicates come first: no other object may fail on a single rank before them.
        names = sorted(state.keys() - self._streams.keys())
        names.sort(key=lambda name: not getattr(state[name], "collective_state_dict", False))
        self._state = {name: state[name] for name in names}
        self.resize(group)

    def resize(self, group: dist.ProcessGroup | None = None) -> None:
        """Use the ranks of another group from now on, as after ``dist_prims.shrink``. An unfinished save is lost."""
        self.group = group_of(group, "Checkpoints")
        self._rank, self._size = self.group.rank(), self.group.size()
        self._second_group: dist.ProcessGroup | None = None
        self._finish: Callable[[], None] | None = None

    def steps(self) -> list[int]:
        """The steps of the checkpoints that this rank sees, the last one first."""
        names = [path.parent.name for path in self.directory.glob(f"step-*/{_CHECKSUMS}")]
        return sorted((int(name[5:]) for name in names if re.fullmatch("step-(0|[1-9][0-9]*)", name)), reverse=True)

    def save(self, step: int, *, background: bool = False) -> None:
        """Write a checkpoint of the state after ``step`` steps; call it on every rank. It is on the disk afterwards.

        ``background``: return when the state is copied. The checkpoint exists after the next :meth:`wait`, ``save`` or
        ``restore``, which raises if a rank could not write.
        """
        # 1. Collect the state, and compare it with the other ranks.
        self.wait()
        operation, tensors = f"Checkpoints.save of step {step}", dict[str, torch.Tensor]()
        self._together(operation, lambda: self._check_step(step))
        self._check_names(operation)
        marks, data = self._together(operation, lambda: self._collect(tensors))
        _compare(operation, gather_values(marks, self.group), tensors, self._rank)
        # 2. Let DCP write the tensors, and _commit() the rest.
        hidden = self.directory / f".step-{step}.{gather_values(secrets.token_hex(4), self.group)[0]}"
        save: Callable[[], object] = functools.partial(
            dcp.save, tensors, checkpoint_id=hidden, process_group=self.group
        )
        if background:
            if self._second_group is None:  # its collectives run beside the collectives of the training
                self._second_group = duplicate(self.group, hidden.name)
            future = dcp.async_save(tensors, checkpoint_id=hidden, process_group=self._second_group)
            save = cast("Future[object]", future).result
        self._finish = functools.partial(self._commit, operation, hidden, save, data)
        if not background:
            self.wait()

    def wait(self) -> None:
        """Complete the save in the background, if there is one; call it on every rank."""
        finish, self._finish = self._finish, None
        if finish:
            finish()

    def restore(self) -> int:
        """Load the last checkpoint into all objects, and return its step, or 0 if there is none; call it on every rank.

        Checksums, names and shapes are compared before anything changes.
        """
        self.wait()
        operation = f"Checkpoints.restore from {self.directory}"
        steps: list[int] = self._together(operation, self.steps)
        self._check_names(f"{operation}, which has the steps {steps}")
        if not steps:
            return 0
        folder, tensors = self.directory / f"step-{steps[0]}", dict[str, torch.Tensor]()
        states = self._together(operation, lambda: {name: state_of(target) for name, target in self._state.items()})
        loads = self._together(operation, lambda: self._read(folder, states, tensors))
        self._together(operation, lambda: dcp.load(tensors, checkpoint_id=folder, process_group=self.group))
        self._together(operation, lambda: [load() for load in loads])
        return steps[0]

    def _check_names(self, operation: str) -> None:
        names = gather_values([operation, *self._state, *self._streams, *self._own], self.group)
        check_lists("Checkpoints", names, "Give all ranks the same, and a directory that they share", self.group)

    def _together(self, operation: str, act: Callable[[], Any]) -> Any:
        """The result of ``act()`` on this rank; if it raises on any rank, all ranks raise."""
        result: Any = None
        failure: BaseException | None = None
        text, remedy = None, f"check the space and the permissions of {self.directory}"
        try:
            result = act()
        except dcp.CheckpointException as error:  # raised on all ranks
            failure = error.failures.get(self._rank, (None,))[0]
            text = failure and f"{type(failure).__name__}: {failure}; {remedy}"
        except Exception as error:
            failure, text = error, f"{type(error).__name__}: {error}" + f"; {remedy}" * isinstance(error, OSError)
        for rank, found in enumerate(gather_values(text, self.group)):
            if found is not None:
                raise CheckpointError(f"{operation}: rank {rank}: {found}") from failure
        return result

    def _check_step(self, step: int) -> None:
        if type(step) is not int or step < 0:
            raise ValueError(f"step {step!r} is not a number of steps; give an int of at least 0")
        if self.steps() and self.steps()[0] >= step:
            raise ValueError(f"{self.directory} has step {self.steps()[0]}; restore() it, or choose another directory")

    def _collect(self, tensors: dict[str, torch.Tensor]) -> tuple[dict[str, int | None], bytes]:
        """Put the tensors of the state into ``tensors``; return the marks (a number for each tensor, which must be the
        same on all ranks, or None where ranks may differ), and the content of this rank's file."""

        def put(key: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensors.setdefault(key, tensor) is not tensor:
                raise ValueError(f"two tensors have the name {key}; choose other names")
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        # 1. The shared state: tensors by their names, and everything else with empty tensors in their places.
        state = {name: _map(name, state_of(target), put) for name, target in self._state.items()}
        marks: dict[str, int | None] = {key: _mark(tensor) for key, tensor in tensors.items()}
        for name, target in self._state.items():
            if hasattr(target, "load_state_dict"):
                marks[f"{name} (names, shapes and plain values)"] = zlib.crc32(repr(state[name]).encode())
            if isinstance(target, nn.Module):
                marks |= dict.fromkeys({f"{name}.{key}" for key, _ in target.named_buffers()} & tensors.keys())
        # 2. The file: the structure of the shared state, and what is this rank's own.
        own = {name: state_of(target) for name, target in {**self._own, **self._streams}.items()}
        own = _map("own", own, lambda key, tensor: tensor.cpu().clone())
        file = io.BytesIO()
        torch.save({"state": state, "own": own, "random": randomness.capture()}, file)
        data = file.getvalue()
        if unsafe := get_unsafe_globals_in_checkpoint(io.BytesIO(data)):
            raise ValueError(f"the state has values that cannot be loaded: {unsafe}; use tensors and plain values")
        return marks, data

    def _commit(self, operation: str, hidden: Path, save: Callable[[], Any], data: bytes) -> None:
        """Write this rank's files into the folder ``hidden``: tensors by ``save()``, and ``data`` as its own file. When
        all ranks have done so, rank 0 gives the folder its name."""

        def write() -> list[str]:
            save()
            own = hidden / f"rank-{self._rank}.pt"
            _put(own, data)
            paths = [own, *hidden.glob(f"__{self._rank}_*")]
            if self._rank == 0:
                paths.append(hidden / ".metadata")
            return [_checksum(path) for path in paths]

        try:
            lines = gather_values(self._together(operation, write), self.group)
            self._together(operation, lambda: self._publish(hidden, lines) if self._rank == 0 else None)
        except CheckpointError:  # raised on all ranks, when none of them writes any more
            shutil.rmtree(hidden, ignore_errors=True)
            raise

    def _publish(self, hidden: Path, written: list[list[str]]) -> None:
        """On rank 0: add the list of checksums, rename the folder, and remove old checkpoints and rests of failed
        saves. ``written``: the lines of each rank's files."""
        lines = [line for of_rank in written for line in of_rank]
        if missing := [line for line in lines if not (hidden / line.split()[0]).exists()]:
            raise ValueError(
                f"{missing[0]} of another rank is not in {hidden}; choose a directory that all ranks share"
            )
        _put(hidden / _CHECKSUMS, "\n".join(lines).encode())
        final = self.directory / hidden.name[1:].split(".")[0]
        shutil.rmtree(final, ignore_errors=True)  # it has no checksums, see steps()
        hidden.rename(final)
        _sync(self.directory)
        for step in self.steps()[self.keep :]:
            (self.directory / f"step-{step}").rename(self.directory / f".step-{step}.old")
        for rest in self.directory.glob(".step-*.*"):  # also of ranks that died while they saved
            shutil.rmtree(rest, ignore_errors=True)

    def _read(
        self, folder: Path, states: dict[str, Any], tensors: dict[str, torch.Tensor]
    ) -> list[Callable[[], object]]:
        """Put the tensors that DCP fills into ``tensors``, and return the calls that load them afterwards.

        A tensor of ``states`` is filled in place; for a name without a tensor there is a new one.
        """
        # 1. Read the files that this rank needs, when their checksums are right and they have every name.
        ranks = _check_files(folder, self._rank, self._size)
        if self._own and ranks != self._size:
            raise ValueError(f"own={list(self._own)} was saved by {ranks} ranks, not {self._size}; start as many")
        saved_as = self._rank if self._rank < ranks else 0
        files = {
            rank: torch.load(folder / f"rank-{rank}.pt", "cpu", weights_only=True, mmap=True)
            for rank in (range(ranks) if self._streams else {0, saved_as})
        }
        mine = files[saved_as]
        for names, there in ((self._state, files[0]["state"]), ({**self._own, **self._streams}, mine["own"])):
            if missing := sorted(names.keys() - there.keys()):
                raise ValueError(f"{missing} not in {folder}, which has {sorted(there)}; load only what was saved")
        # 2. For each saved tensor a place of the same shape: this rank's own tensor of that name, or a new one.
        here: dict[str, torch.Tensor] = {}
        for name, state in states.items():
            _map(name, state, here.setdefault)

        def place(key: str, saved: torch.Tensor) -> torch.Tensor:
            tensors[key] = here[key] if key in here else torch.empty_like(saved, device="cpu")
            check_alike(key, saved, tensors[key])
            return tensors[key]

        # 3. What loads the shared state, which rank 0 has saved for all.
        loads: list[Callable[[], object]] = []
        for name, target in self._state.items():
            if isinstance(target, torch.Tensor | dict):
                _map(name, states[name], tensors.setdefault)
            else:
                state = _map(name, files[0]["state"][name], place)
                loads.append(functools.partial(load, name, target, state))
                if isinstance(target, nn.Module) and (unlike := sorted(state.keys() ^ states[name].keys())):
                    raise ValueError(f"{name} is unlike the saved one in {unlike[:5]}; make it as it was saved")
        # 4. What loads this rank's own state, the streams of all ranks, and the random states.
        own = _map("own", mine["own"], lambda key, tensor: tensor.clone())
        loads += [functools.partial(load, name, target, own[name]) for name, target in self._own.items()]
        for name, stream in self._streams.items():
            loads.append(functools.partial(load, name, stream, [file["own"][name] for file in files.values()]))
        if self._rank < ranks:
            return [*loads, functools.partial(randomness.restore, mine["random"])]
        return [*loads, functools.partial(randomness.derive, mine["random"], self._rank)]


def _map(key: str, state: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """A copy of the state with ``change(key, tensor)`` for each tensor.

    >>> _map("a", {"b": [torch.ones(1), 2]}, lambda key, tensor: key)
    {'b': ['a.b.0', 2]}
    """
    if isinstance(state, DTensor):
        return change(key, state.detach())
    if isinstance(state, torch.Tensor):
        return change(key, state.detach().as_subclass(torch.Tensor))
    if isinstance(state, dict):
        mapped = copy.copy(state)
        mapped.update({name: _map(f"{key}.{name}", value, change) for name, value in state.items()})
        return mapped
    if type(state) in (list, tuple):
        return type(state)(_map(f"{key}.{number}", value, change) for number, value in enumerate(state))
    return state


def _mark(tensor: torch.Tensor) -> int:
    """A sum of the bits of a tensor; 0 for a DTensor, whose parts differ."""
    if isinstance(tensor, DTensor):
        return 0
    data = tensor.contiguous().flatten().view(torch.uint8)
    if len(data) % 8 or data.data_ptr() % 8:  # a padded copy, also of data that only lies at an odd address
        data = nn.functional.pad(data, (0, -len(data) % 8 or 8))
    return int(data.view(torch.int64).sum())


def _compare(
    operation: str, marks: Iterable[Mapping[str, int | None]], tensors: dict[str, torch.Tensor], own_rank: int
) -> None:
    """Raise if ranks have unlike tensors under one name. A tensor without a mark may differ by rank: the lowest rank
    that has it saves it, and it is removed from ``tensors`` on the others."""
    first: dict[str, tuple[int, int | None]] = {}
    for rank, by_key in enumerate(marks):
        for key, mark in by_key.items():
            owner, other = first.setdefault(key, (rank, mark))
            if mark != other:
                raise CheckpointError(
                    f"{operation}: {key} differs between the ranks {owner} and {rank}; give what is each rank's own "
                    "as own=, or as DTensors"
                )
            if mark is None and owner != rank == own_rank:
                del tensors[key]


def _check_files(folder: Path, rank: int, size: int) -> int:
    """Check this rank's share of the files; return the number of ranks that wrote them."""
    lines = (folder / _CHECKSUMS).read_text(errors="replace").split("\n")
    for line in lines[rank::size]:
        path = folder / line.split(" ")[0]
        if _checksum(path) != line:
            raise ValueError(f"{path} is damaged or missing; remove {folder} to use the checkpoint before it")
    return sum(line.startswith("rank-") for line in lines)


def _checksum(path: Path) -> str:
    """The line of a file in the list of checksums."""
    checksum = length = 0
    if path.is_file():
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                checksum, length = zlib.crc32(block, checksum), length + len(block)
    return f"{path.name} {length} {checksum:08x}"


def _put(path: Path, data: bytes) -> None:
    """Write a file, and wait until the file and its name are on the disk."""
    path.write_bytes(data)
    _sync(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
