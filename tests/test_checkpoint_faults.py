"""Checkpoints when something goes wrong: damaged files, full disks, deaths in the middle; one is always whole."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dist_prims
from dist_prims.launch import RankFailed
from dist_prims.training.checkpoint import CheckpointError, Checkpoints, Damaged
from dist_prims.training.checkpoint.files import digest
from dist_prims.training.checkpoint.manifest import Manifest, name_of


def spawn(body: Callable[..., Any], size: int, backend: str = "dist_prims") -> list[Any]:
    return dist_prims.spawn(body, size, timeout=60, backend=backend)


def values(folder: Path, start: float = 0.0, **options: Any) -> tuple[torch.Tensor, Checkpoints]:
    value = torch.full((1000,), start)
    return value, Checkpoints(folder, {"value": value}, sharded={"rows": torch.zeros(3, 2)}, **options)


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


@pytest.mark.parametrize("harm", [cut_off, flip, Path.unlink])
def test_a_damaged_file_is_refused_by_name(harm: Callable[[Path], None], tmp_path: Path) -> None:
    def one(name: str) -> None:
        folder = tmp_path / name
        three_saves(folder)
        dist.barrier()
        if dist.get_rank() == 0:
            harm(next(folder.rglob(name) if name.endswith("json") else folder.glob(f"step-3.*/{name}")))
        dist.barrier()
        value, checkpoints = values(folder)
        speaks = dist.get_rank() == 0 and not (harm is Path.unlink and name.endswith("json"))  # not there: never seen
        with pytest.warns(RuntimeWarning, match=name.replace(".", r"\.")) if speaks else contextlib.nullcontext():
            assert checkpoints.restore() == 2
        assert value.eq(2).all()
        checkpoints.save(3)
        again, checkpoints = values(folder)
        assert (checkpoints.restore(), checkpoints.steps()) == (3, [3, 2])
        assert again.eq(2).all()
        assert len(list(folder.iterdir())) == 4

    def body() -> None:
        for name in ("state.pt", "rank-1.pt", "shard-0.pt", "step-3.json"):
            one(name)

    spawn(body, 2)


def test_nothing_but_damage_is_no_new_beginning(tmp_path: Path) -> None:
    def body() -> None:
        three_saves(tmp_path)
        dist.barrier()
        if dist.get_rank() == 0:
            for path in tmp_path.rglob("state.pt"):
                flip(path)
        dist.barrier()
        value, checkpoints = values(tmp_path)
        warns = pytest.warns(RuntimeWarning) if dist.get_rank() == 0 else contextlib.nullcontext()
        with warns, pytest.raises(Damaged, match=r"every checkpoint is damaged.*state\.pt.*state\.pt"):
            checkpoints.restore()
        assert value.eq(0).all()

    spawn(body, 2)


def test_what_is_loaded_runs_nothing(tmp_path: Path) -> None:
    """A file whose checksum is right, and which would run a command if pickle loaded it."""

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    def body() -> None:
        _, checkpoints = values(tmp_path)
        path = checkpoints.save(1)
        manifest = Manifest.parse(path.read_text(), "")
        file = tmp_path / manifest.folder / "state.pt"
        torch.save({"value": Bomb()}, file)
        manifest.files["state.pt"].update(bytes=file.stat().st_size, sha256=digest(file))
        (tmp_path / name_of(1)).write_text(manifest.text())
        with pytest.raises(CheckpointError, match=r"(?s)UnpicklingError.*mkdir"):
            checkpoints.restore()

    spawn(body, 1)
    assert not (tmp_path / "harm").exists()


def no_room(kind: int = signal.SIG_IGN) -> None:
    """Files of this process may not grow beyond 4 KB: a write fails, or the process dies in the middle of it."""
    signal.signal(signal.SIGXFSZ, kind)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


@pytest.mark.parametrize("backend", ["dist_prims", "gloo"])
def test_a_failed_write_is_told_to_all_and_the_old_checkpoint_stays(backend: str, tmp_path: Path) -> None:
    def body() -> None:
        three_saves(tmp_path)
        value, checkpoints = values(tmp_path)
        big = Checkpoints(tmp_path, {}, own={"big": torch.zeros(10**5)})
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 1:
            no_room()
        with pytest.raises(CheckpointError, match=r"save of step 4.*rank 1: OSError.*[Ff]ile too large"):
            big.save(4)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert checkpoints.restore() == 3
        assert value.eq(3).all()
        big.save(4)  # the group is as it was

    spawn(body, 3, backend)
    assert sorted(path.name[:7] for path in tmp_path.iterdir()) == ["step-3.", "step-3.", "step-4.", "step-4."]


def test_a_rank_that_dies_while_it_writes(tmp_path: Path) -> None:
    def dies() -> None:
        three_saves(tmp_path)
        big = Checkpoints(tmp_path, {}, own={"big": torch.zeros(10**5)})
        if dist.get_rank() == 1:
            no_room(signal.SIG_DFL)
        big.save(4)

    def goes_on() -> None:
        value, checkpoints = values(tmp_path)
        assert checkpoints.restore() == 3
        assert value.eq(3).all()
        checkpoints.save(4)

    with pytest.raises(RankFailed, match="SIGXFSZ"):
        spawn(dies, 2)
    (half,) = tmp_path.glob("step-4.*")
    assert (half / "rank-1.pt").stat().st_size == 4096  # it did die in the middle
    spawn(goes_on, 2)
    assert not half.exists()
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["step-3.json", "step-4.json"]


def test_a_full_disk(tmp_path: Path) -> None:
    program = (
        "import torch, sys, dist_prims\n"
        "from dist_prims.training.checkpoint import Checkpoints\n"
        "dist_prims.init()\n"
        "Checkpoints(sys.argv[1], {'small': torch.ones(1)}).save(1)\n"
        "try:\n"
        "    Checkpoints(sys.argv[1], {'big': torch.zeros(10**6)}).save(2)\n"
        "except RuntimeError as error:\n"
        "    print(error, Checkpoints(sys.argv[1], {}).restore())\n"
    )
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "disk").mkdir()
    inside = f"mount -t tmpfs -o size=1m none {tmp_path}/disk && {sys.executable} {tmp_path}/program.py {tmp_path}/disk"
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", tmp_path / "disk"]).returncode
    ):
        pytest.skip("no user namespace with a mount of its own")
    done = subprocess.run([*unshare, "sh", "-c", inside], capture_output=True, text=True, timeout=100, check=False)
    assert "No space left on device" in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith(" 1")


@pytest.mark.parametrize("size", [1, 3])
def test_a_directory_that_cannot_be(size: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def body() -> None:
        _, checkpoints = values(tmp_path / "file" / "below")
        with pytest.raises(CheckpointError, match=r"rank 0: NotADirectoryError.*file"):
            checkpoints.save(1)

    spawn(body, size)


def test_a_directory_that_ranks_do_not_share(tmp_path: Path) -> None:
    def body() -> None:
        _, checkpoints = values(tmp_path / str(dist.get_rank()))
        with pytest.raises(CheckpointError, match=r"-1\.pt of another rank is not seen here; choose a directory"):
            checkpoints.save(1)
        assert not checkpoints.steps()

    spawn(body, 2)
