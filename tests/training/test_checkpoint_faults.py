"""Checkpoints when something goes wrong: damaged files, full disks, deaths in the middle; one is always whole."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dist_prims
from dist_prims.launch import RankFailedError
from dist_prims.training import ShardedSampler
from dist_prims.training.checkpoint import CheckpointError, Checkpoints, DamagedCheckpointError
from dist_prims.training.checkpoint.files import digest, put_text
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


@pytest.mark.sampled(1)
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


def test_damage_of_every_checkpoint_is_an_error(tmp_path: Path) -> None:
    def body() -> None:
        three_saves(tmp_path)
        dist.barrier()
        if dist.get_rank() == 0:
            for path in tmp_path.rglob("state.pt"):
                flip(path)
        dist.barrier()
        value, checkpoints = values(tmp_path)
        warns = pytest.warns(RuntimeWarning) if dist.get_rank() == 0 else contextlib.nullcontext()
        with warns, pytest.raises(DamagedCheckpointError, match=r"every checkpoint is damaged.*state\.pt.*state\.pt"):
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
            CheckpointError, match=r"rank 1: OSError: .*Too many open files.*every rank can read"
        ) as said:
            checkpoints.restore()
        assert not isinstance(said.value, DamagedCheckpointError)
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert checkpoints.restore() == 3
        assert value.eq(3).all()

    spawn(body, 2, "gloo")


def test_where_warnings_are_errors_all_ranks_raise(tmp_path: Path) -> None:
    """Only rank 0 warns; it raised alone, and the others waited for it."""

    def body() -> None:
        three_saves(tmp_path)
        dist.barrier()
        if dist.get_rank() == 0:
            flip(next(tmp_path.glob("step-3.*/state.pt")))
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(CheckpointError, match=r"rank 0: RuntimeWarning: .*state\.pt is damaged"):
                values(tmp_path)[1].restore()

    spawn(body, 3)


def test_a_save_that_fails_after_the_manifest_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails at the very last sync: the manifest may be there, so what it names must be, too."""

    def body() -> None:
        value, checkpoints = values(tmp_path, 1.0, keep=1)
        checkpoints.save(5)
        value.fill_(2)

        def fails(path: Path, text: str) -> None:
            put_text(path, text)
            raise OSError(errno.EIO, "Input/output error", str(path.parent))

        with monkeypatch.context() as patched:
            patched.setattr("dist_prims.training.checkpoint.checkpoints.put_text", fails)
            with pytest.raises(CheckpointError, match="Input/output error"):
                checkpoints.save(5)
        again, others = values(tmp_path)
        assert others.restore() == 5
        assert again.eq(2).all()
        checkpoints.save(5)
        assert len(list(tmp_path.iterdir())) == 2

    spawn(body, 2)


def test_one_directory_for_two_things_is_refused(tmp_path: Path) -> None:
    """The second's checkpoint of step 1 replaced the first's."""

    def body() -> None:
        model, average = torch.ones(1), torch.ones(1)
        first, second = Checkpoints(tmp_path, {"model": model}), Checkpoints(tmp_path, {"average": average})
        first.save(1)
        with pytest.raises(ValueError, match=r"has a checkpoint of step 1; restore\(\) it first, or choose another"):
            second.save(1)
        first.save(1)
        assert Checkpoints(tmp_path, {"model": model}).restore() == 1

    spawn(body, 2)


def test_files_of_others_stay(tmp_path: Path) -> None:
    """They were taken for damaged manifests, or step-007.json for that of step 7."""
    foreign = {"step-1.json": '{"loss": 3}', "step-007.json": "{}", "step-٣.json": "{}"}
    for name, text in foreign.items():
        (tmp_path / name).write_text(text)

    def body() -> None:
        three = Checkpoints(tmp_path, {"x": torch.ones(1)}, keep=1)
        for step in (4, 5, 6):
            three.save(step)
        assert three.restore() == 6
        assert three.steps() == [6, 1]

    spawn(body, 1)
    assert {name: (tmp_path / name).read_text() for name in foreign} == foreign
    assert len(list(tmp_path.iterdir())) == 3 + 2


def test_only_rank_0_does_not_see_the_directory(tmp_path: Path) -> None:
    """All ranks started again from step 0."""

    def body() -> None:
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        mine = tmp_path / str(dist.get_rank())
        if dist.get_rank() == 1:
            values(mine, group=alone)[1].save(4)
        with pytest.raises(CheckpointError, match="rank 1 sees step 4, rank 0 none; choose a directory that all ranks"):
            values(mine)[1].restore()

    spawn(body, 2)


def test_of_the_other_ranks_only_streams_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank read and hashed what each other has for itself."""

    def body() -> None:
        state, own = {"sampler": ShardedSampler(10)}, {"own": torch.zeros(9)}
        checkpoints = Checkpoints(tmp_path, state, own=own)
        checkpoints.save(1)
        read: list[str] = []

        def noted(path: Path) -> str:
            read.append(path.name)
            return digest(path)

        with monkeypatch.context() as patched:
            patched.setattr("dist_prims.training.checkpoint.manifest.digest", noted)
            checkpoints.restore()
        assert sorted(read) == [f"rank-{dist.get_rank()}.pt", "streams-0.pt", "streams-1.pt"]

    spawn(body, 2)


class Of:
    """Has a value as its state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def test_what_is_saved_can_be_loaded(tmp_path: Path) -> None:
    """weights_only reads no whole numbers of more than 255 bytes; MultiStepLR has a Counter in its state."""

    def body() -> None:
        largest = (1 << 2039) - 1
        values = [largest, -largest, Counter([1, 1, 2]), {"a": (1, [None, 2.5j])}, torch.Size([2]), b"\xff" * 300]
        checkpoints = Checkpoints(tmp_path, {str(number): Of(value) for number, value in enumerate(values)})
        checkpoints.save(1)
        again = Checkpoints(tmp_path, {str(number): Of(value) for number, value in enumerate(values)})
        again.restore()
        whole: Any = again._whole
        assert [each.value for each in whole.values()] == values
        rate = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)]), [1, 2])
        Checkpoints(tmp_path / "rate", {"rate": rate}).save(1)
        assert Checkpoints(tmp_path / "rate", {"rate": rate}).restore() == 1
        for value in (1 << 2039, -(1 << 2039), {1 << 2039: 0}):
            with pytest.raises(ValueError, match=r"'x' holds a number of 2040 bits at \['value'.*at most 2039 bits"):
                Checkpoints(tmp_path / "x", {"x": Of(value)}).save(1)

    spawn(body, 1)


def no_room(kind: int = signal.SIG_IGN) -> None:
    """Files of this process may not grow beyond 4 KB: a write fails, or the process dies in the middle of it."""
    signal.signal(signal.SIGXFSZ, kind)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


@pytest.mark.parametrize("backend", ["dist_prims", "gloo"])
def test_a_failed_write_raises_on_all_ranks_and_the_old_checkpoint_stays(backend: str, tmp_path: Path) -> None:
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

    with pytest.raises(RankFailedError, match="SIGXFSZ"):
        spawn(dies, 2)
    (half,) = tmp_path.glob("step-4.*")
    assert (half / "rank-1.pt").stat().st_size == 4096  # it did die in the middle
    spawn(goes_on, 2)
    assert not half.exists()
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["step-3.json", "step-4.json"]


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
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


def test_a_directory_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def body() -> None:
        _, checkpoints = values(tmp_path / "file" / "below")
        with pytest.raises(CheckpointError, match=r"rank 0: NotADirectoryError.*file"):
            checkpoints.save(1)

    spawn(body, 3)


def test_a_directory_that_ranks_do_not_share(tmp_path: Path) -> None:
    def body() -> None:
        _, checkpoints = values(tmp_path / str(dist.get_rank()))
        with pytest.raises(CheckpointError, match=r"-1\.pt of another rank is not visible here; choose a directory"):
            checkpoints.save(1)
        assert not checkpoints.steps()

    spawn(body, 2)
