"""Checkpoints of models split into stages: a folder of parts and a manifest.

Parts hold the names of the unsplit model, so the same checkpoint loads into the model, into the same stages, or into
another number of them. The manifest is written last, and a part is never written over: its name is its content's hash.
So a crash at any moment leaves the checkpoint that was there before, whole. A part that is missing, cut off or changed
is refused before anything is loaded.

>>> import tempfile
>>> from dist_prims.training.pipeline.split_model import split
>>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
>>> again = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
>>> with tempfile.TemporaryDirectory() as folder:
...     save_stages(folder, split(model, 2, by=[2, 1]))
...     load_stages(folder, again)
>>> torch.equal(again[2].weight, model[2].weight)
True
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...agreement import gather_or_raise
from ...collectives.call import group_of
from ..checkpoint.files import digest, sync_folder
from ..checkpoint.plain_state import plain
from .chain import Stage

__all__: list[str] = []

_MANIFEST = "manifest.json"
_FORMAT = "dist_prims stages 1"


def save_stages(
    path: str | os.PathLike[str],
    stages: Stage | Sequence[Stage] | Mapping[int, nn.Module],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write ``stages`` and, with all those of the other ranks of ``group``, a manifest into the folder ``path``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_stages(folder, {0: nn.Linear(2, 2)})
    ...     [file.suffix for file in sorted(Path(folder).iterdir())]
    ['.json', '.pt']

    A mapping gives modules that are not of ``split`` their numbers. Where torch.distributed is in use this is a
    collective: each stage must be on exactly one rank of ``group``, every rank must see the folder, and when it returns
    the checkpoint is there; when a rank fails, all raise.
    """
    if dist.is_initialized():
        group = group_of(group, "save_stages")
    folder = Path(path)
    entries: list[dict[str, Any]] = []
    failure: Exception | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        entries = [_write_part(folder, number, stage) for number, stage in _numbered(stages).items()]
    except Exception as error:  # sent to the other ranks
        failure = error
    gathered = _gather(entries, failure, group)
    if _rank(group) == 0:
        failure = None
        try:
            _write_manifest(folder, sorted((entry for each in gathered for entry in each), key=lambda e: e["stage"]))
        except Exception as error:
            failure = error
    _gather([], failure, group)


def load_stages(path: str | os.PathLike[str], modules: nn.Module | Sequence[Stage] | Mapping[int, nn.Module]) -> None:
    """Load what :func:`save_stages` wrote into the unsplit model, or into stages, however many there are.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_stages(folder, {0: nn.Linear(2, 2)})
    ...     load_stages(folder, nn.Linear(2, 3))
    Traceback (most recent call last):
    ValueError: load_stages: weight is (2, 2) in the checkpoint and (3, 2) in the module; make it as it was saved

    Stages, or a mapping of modules, take their parts, and only what they need is read; a model must take everything.
    Nothing is changed unless all fits. It is no collective: a rank that raises does not stop the others.
    """
    folder = Path(path)
    whole = isinstance(modules, nn.Module) and not isinstance(modules, Stage)
    targets = list(_modules(modules))
    part_of = _read_manifest(folder)
    states = [module.state_dict() for module in targets]
    wanted = {key for state in states for key in state}
    _refuse("load_stages", "are in no part of the checkpoint", wanted - part_of.keys())
    if whole:
        _refuse("load_stages", "of the checkpoint are not in the module", part_of.keys() - wanted)
    parts = {entry["file"]: entry for key, entry in part_of.items() if key in wanted}
    found: dict[str, Any] = {}
    for entry in parts.values():
        found.update(_read_part(folder, entry))
    for state in states:
        for key, there in state.items():
            if isinstance(there, torch.Tensor) and there.shape != found[key].shape:
                raise ValueError(
                    f"load_stages: {key} is {tuple(found[key].shape)} in the checkpoint and {tuple(there.shape)} in "
                    "the module; make it as it was saved"
                )
    for module, state in zip(targets, states, strict=True):
        module.load_state_dict({key: found[key] for key in state})


def _modules(given: nn.Module | Sequence[Stage] | Mapping[int, nn.Module]) -> Iterable[nn.Module]:
    if isinstance(given, nn.Module):
        return [given]
    return given.values() if isinstance(given, Mapping) else given


def _numbered(stages: Stage | Sequence[Stage] | Mapping[int, nn.Module]) -> Mapping[int, nn.Module]:
    if isinstance(stages, Mapping):
        return stages
    every = [stages] if isinstance(stages, Stage) else list(stages)
    for stage in every:
        if not isinstance(stage, Stage):
            raise ValueError(
                f"save_stages: a {type(stage).__name__} is no stage of split(); give its number: {{number: module}}"
            )
    _refuse_twice("stages", (stage.number for stage in every))
    return {stage.number: stage for stage in every}


def _write_part(folder: Path, number: int, stage: nn.Module) -> dict[str, Any]:
    state = dict(plain(f"stage {number}", stage.state_dict()))
    temporary = folder / f".stage-{number}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
        sha256 = digest(temporary)
        final = f"stage-{number}-{sha256[:16]}.pt"
        _put(temporary, folder / final)
    finally:
        temporary.unlink(missing_ok=True)
    count = stage.count if isinstance(stage, Stage) else None
    return {"stage": number, "of": count, "file": final, "sha256": sha256, "keys": list(state)}


def _write_manifest(folder: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write the manifest, and remove files that no manifest names any more."""
    _refuse_twice("stages", (entry["stage"] for entry in entries))
    _refuse_twice("keys", (key for entry in entries for key in entry["keys"]))
    count = max([len(entries), *(entry["of"] or entry["stage"] + 1 for entry in entries)])
    _refuse(
        "save_stages",
        f"of {count} stages were saved by no rank",
        set(range(count)) - {entry["stage"] for entry in entries},
    )
    names = {entry["file"] for entry in entries}
    unseen = {name for name in names if not (folder / name).exists()}
    _refuse(
        "save_stages",
        f"were written by other ranks and are not in {folder} on rank 0; choose a folder that all share",
        unseen,
    )
    temporary = folder / f".{_MANIFEST}.{os.getpid()}.tmp"
    try:
        temporary.write_text(json.dumps({"format": _FORMAT, "parts": list(entries)}, indent=1))
        _put(temporary, folder / _MANIFEST)
    finally:
        temporary.unlink(missing_ok=True)
    unfinished = folder.glob(".stage-*[0-9].*[0-9].tmp")  # all have written; these are of ranks that died
    for old in (*folder.glob(f"stage-*-{'[0-9a-f]' * 16}.pt"), *unfinished):
        if old.name not in names:
            with contextlib.suppress(OSError):  # the checkpoint is there; what cannot be removed may stay
                old.unlink()


def _put(temporary: Path, final: Path) -> None:
    """Sync a file, rename it, and sync the folder."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(final)
    sync_folder(final.parent)


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """The part that each key lies in."""
    file = folder / _MANIFEST
    if not file.exists():
        raise FileNotFoundError(f"load_stages: there is no {file}; save_stages() writes it when all parts are there")
    try:
        manifest = json.loads(file.read_text())
        entries = [(entry, list(entry["keys"]), Path(entry["file"]), entry["sha256"]) for entry in manifest["parts"]]
        fits = manifest["format"] == _FORMAT and all(name.parent == Path() for _, _, name, _ in entries)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"load_stages: {file} is no manifest of stages: {error!r}") from None
    if not fits:
        raise ValueError(f"load_stages: {file} is of another format, or names files elsewhere")
    _refuse_twice("keys", (key for _, keys, _, _ in entries for key in keys), f"load_stages: in {file} ")
    return {key: entry for entry, keys, _, _ in entries for key in keys}


def _read_part(folder: Path, entry: dict[str, Any]) -> dict[str, Any]:
    file = folder / entry["file"]
    if not file.exists():
        raise FileNotFoundError(f"load_stages: {file}, the part of stage {entry['stage']}, is missing")
    found = digest(file)
    if found != entry["sha256"]:
        raise ValueError(
            f"load_stages: {file}, the part of stage {entry['stage']}, is damaged: its SHA-256 is {found[:16]}…, "
            f"the manifest says {entry['sha256'][:16]}…"
        )
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    if list(state) != list(entry["keys"]):
        raise ValueError(f"load_stages: {file} holds other keys than the manifest says")
    return state


def _refuse(operation: str, what: str, keys: Iterable[Any]) -> None:
    every = sorted(keys)
    if every:
        more = f" and {len(every) - 5} more" if len(every) > 5 else ""
        raise ValueError(f"{operation}: {', '.join(map(str, every[:5]))}{more} {what}")


def _refuse_twice(what: str, values: Iterable[Any], where: str = "save_stages: ") -> None:
    twice = sorted(value for value, count in Counter(values).items() if count > 1)
    if twice:
        raise ValueError(
            f"{where}{what} {', '.join(map(str, twice[:5]))} come more than once; each belongs to one part"
        )


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _gather(entries: list[dict[str, Any]], failure: Exception | None, group: dist.ProcessGroup | None) -> list[Any]:
    """The ``entries`` of every rank; every rank raises if one gives a ``failure``. It is also a barrier."""
    if dist.is_initialized():
        return gather_or_raise("save_stages", entries, failure, group)
    if failure is not None:
        raise failure
    return [entries]
