"""Checkpoints when something goes wrong: damaged files, full disks, deaths in the middle; one is always whole."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from averaging import spawn

from dist_prims.errors import MismatchError
from dist_prims.launch import RankFailedError
from dist_prims.training.checkpoint import CheckpointError, Checkpoints, _checksum


def values(folder: Path, start: float = 0.0, **options: Any) -> tuple[torch.Tensor, Checkpoints]:
    value = torch.full((1000,), start)
    return value, Checkpoints(folder, {"value": value, "other": torch.zeros(3, 2)}, **options)


def three_saves(folder: Path) -> None:
    value, checkpoints = values(folder)
    for step in (1, 2, 3):
        value.fill_(step)
        checkpoints.save(step)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("harm", [cut_off, flip, Path.unlink])
def test_a_damaged_file_is_refused_by_name_before_anything_changes(
    harm: Callable[[Path], None], tmp_path: Path
) -> None:
    def one(name: str) -> None:
        folder = tmp_path / name
        three_saves(folder)
        if dist.get_rank() == 0:
            harm(folder / "step-3" / name)
        dist.barrier()
        value, checkpoints = values(folder)
        if name == "checksums.txt" and harm is Path.unlink:
            assert checkpoints.steps() == [2]  # without checksums a save counts as unfinished
        else:
            with pytest.raises(CheckpointError, match=rf"damaged or missing; remove {folder}/step-3 to use the checkp"):
                checkpoints.restore()
        assert value.eq(0).all()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "step-3")
        dist.barrier()
        assert checkpoints.restore() == 2
        assert value.eq(2).all()
        checkpoints.save(3)
        assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-3"]

    def body() -> None:
        for name in ("__0_0.distcp", "__1_0.distcp", "rank-1.pt", ".metadata", "checksums.txt"):
            one(name)

    spawn(body, 2)


def test_what_a_rank_has_for_itself_runs_nothing_when_it_is_loaded(tmp_path: Path) -> None:
    """A file whose checksum is right, and which would run a command if pickle loaded it."""

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    def body() -> None:
        _, checkpoints = values(tmp_path)
        checkpoints.save(1)
        file, checksums = tmp_path / "step-1/rank-0.pt", tmp_path / "step-1/checksums.txt"
        torch.save({"state": Bomb()}, file)
        lines = checksums.read_text().split("\n")
        checksums.write_text("\n".join(_checksum(file) if "rank-0" in line else line for line in lines))
        with pytest.raises(CheckpointError, match=r"(?s)UnpicklingError.*mkdir"):
            checkpoints.restore()

    spawn(body, 1)
    assert not (tmp_path / "harm").exists()


def test_a_file_that_cannot_be_read_now_is_not_damaged(tmp_path: Path) -> None:
    """One rank had too many open files; all went on from step 2, and the next save removed step 3."""

    def body() -> None:
        three_saves(tmp_path)
        value, checkpoints = values(tmp_path)
        assert checkpoints.restore() == 3
        before, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1 + max(map(int, os.listdir("/proc/self/fd"))), before[1]))
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(
            CheckpointError, match=r"rank 1: OSError: .*Too many open files.*check the space and the perm"
        ):
            checkpoints.restore()
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert checkpoints.restore() == 3
        assert value.eq(3).all()

    spawn(body, 2, "gloo")


def test_only_rank_0_does_not_see_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks started again from step 0."""
    for rank in "01":
        (tmp_path / rank).mkdir()

    def body() -> None:
        monkeypatch.chdir(tmp_path / str(dist.get_rank()))
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        if dist.get_rank() == 1:
            values(Path("here"), group=alone)[1].save(4)
        with pytest.raises(
            MismatchError, match=r"has the steps \[\];.*has the steps \[4\]. .*a directory that they share"
        ):
            values(Path("here"))[1].restore()

    spawn(body, 2)


def no_room(kind: int = signal.SIG_IGN) -> None:
    """Files of this process may not grow beyond 4 KB: a write fails, or the process dies in the middle of it."""
    signal.signal(signal.SIGXFSZ, kind)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def big(rank: int) -> dict[str, torch.Tensor]:
    """A state of which only rank 1 has a large tensor."""
    return {"big": torch.zeros(10**5)} if rank == 1 else {"small": torch.zeros(1)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("where", ["state", "own", "background"])
@pytest.mark.parametrize("backend", ["dist_prims", "gloo"])
def test_a_failed_write_raises_on_all_ranks_and_the_old_checkpoint_stays(
    backend: str, where: str, tmp_path: Path
) -> None:
    def body() -> None:
        three_saves(tmp_path)
        value, checkpoints = values(tmp_path, 3.0)
        own = {"own": torch.zeros(10**5 if where == "own" else 1)}
        large = Checkpoints(
            tmp_path,
            {"value": value, "other": torch.zeros(3, 2), "tensors": {} if where == "own" else big(dist.get_rank())},
            own=own,
        )

        def save(step: int) -> None:
            large.save(step, background=where == "background")
            large.wait()

        save(4)  # makes the second group
        value.zero_()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 1:
            no_room()
        with pytest.raises(
            CheckpointError, match=r"save of step 5: rank 1: .*; check the space and the permissions of"
        ):
            save(5)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert checkpoints.restore() == 4
        assert value.eq(3).all()
        save(5)  # the group is as it was

    spawn(body, 3, backend)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-5"]


@pytest.mark.parametrize("moment", ["in DCP", "in its own file", "before the rename"])
def test_a_rank_that_is_killed_while_it_saves(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies() -> None:
        three_saves(tmp_path)
        rank = dist.get_rank()
        large = Checkpoints(tmp_path, {"tensors": big(rank)}, own={"own": torch.zeros(10**5)})
        if moment == "before the rename":
            monkeypatch.setattr(Path, "rename", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        elif rank == 1:
            no_room(signal.SIG_DFL)
        if moment == "in its own file":
            monkeypatch.setattr(dcp, "save", lambda *_, checkpoint_id, **__: Path(checkpoint_id).mkdir(exist_ok=True))
        large.save(4)

    def goes_on() -> None:
        value, checkpoints = values(tmp_path)
        assert checkpoints.restore() == 3
        assert value.eq(3).all()
        checkpoints.save(4)

    with pytest.raises(RankFailedError, match=r"SIGKILL|SIGXFSZ"):
        spawn(dies, 2)
    (half,) = tmp_path.glob(".step-4.*")
    if moment != "before the rename":
        name = "__1_0.distcp" if moment == "in DCP" else "rank-1.pt"
        assert (half / name).stat().st_size == 4096  # it did die in the middle
    spawn(goes_on, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-4"]


def test_a_directory_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def body() -> None:
        _, checkpoints = values(tmp_path / "file" / "below")
        with pytest.raises(CheckpointError, match=r"rank 0: (NotADirectory|FileExists)Error.*file"):
            checkpoints.save(1)

    spawn(body, 3)


def test_a_directory_that_ranks_do_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in "01":
        (tmp_path / rank).mkdir()

    def body() -> None:
        monkeypatch.chdir(tmp_path / str(dist.get_rank()))
        _, checkpoints = values(Path("here"))
        with pytest.raises(
            CheckpointError, match=r"rank-1.pt .*of another rank is not in .*; choose a directory that all ranks share"
        ):
            checkpoints.save(1)
        assert not checkpoints.steps()

    spawn(body, 2)
