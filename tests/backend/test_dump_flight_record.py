"""The folder of the flight records: it is made, and a record that cannot be written is not lost without a word."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dist_prims
from dist_prims.backend.dump_flight_record import dump_file
from dist_prims.cli import main


def fail(remove: str = "") -> None:
    """Make a call that fails on all ranks of the default group; before it, remove a folder."""
    dist.barrier()
    if remove and dist.get_rank() == 0:
        shutil.rmtree(remove)
    dist.barrier()
    with pytest.raises(dist_prims.MismatchError):
        dist.all_reduce(torch.ones(2 + dist.get_rank()))
    sys.stderr.flush()


def run(remove: str = "") -> None:
    dist_prims.spawn(fail, 2, (remove,), backend="dist_prims", timeout=60)


def test_a_missing_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A job wrote no record, without a word, and ``doctor --dump`` advised to set the variable that was set."""
    folder = tmp_path / "of" / "job"
    monkeypatch.setenv("DIST_PRIMS_DUMP", str(folder))
    run()
    assert sorted(path.name for path in folder.iterdir()) == ["0_rank0.json", "0_rank1.json"]
    assert "DIST_PRIMS_DUMP" not in capfd.readouterr().err


def test_a_relative_folder_is_resolved_when_the_group_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DIST_PRIMS_DUMP", "records")

    def body() -> None:
        os.chdir("/")
        fail()

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)
    assert len(list((tmp_path / "records").iterdir())) == 2


def test_a_folder_that_cannot_be_made_is_named_when_the_group_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "records"
    monkeypatch.setenv("DIST_PRIMS_DUMP", str(folder))
    run()
    lines = [line for line in capfd.readouterr().err.splitlines() if "DIST_PRIMS_DUMP" in line]
    assert len(lines) == 2, "once on each rank"
    for line in lines:
        assert f"DIST_PRIMS_DUMP={folder}: no flight record can be written there: " in line
        assert "Not a directory" in line


def test_a_relative_folder_in_a_removed_working_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rank raised while it made a group, and the other ranks waited for it."""
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    monkeypatch.setenv("DIST_PRIMS_DUMP", "records")
    assert dump_file("0", 1) == ""
    assert "DIST_PRIMS_DUMP=records: no flight record can be written there: " in capfd.readouterr().err


def test_a_folder_that_is_removed_is_named_when_a_call_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "records"
    monkeypatch.setenv("DIST_PRIMS_DUMP", str(folder))
    run(remove=str(folder))
    said = capfd.readouterr().err
    for rank in range(2):
        path = folder / f"0_rank{rank}.json"
        assert f"rank {rank}: the flight record of a failed call is lost, {path} cannot be written: No such" in said


def test_doctor_says_that_a_folder_is_missing_or_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--dump", str(tmp_path / "missing")]) == 2
    assert f"{tmp_path / 'missing'} does not exist" in capsys.readouterr().err
    assert main(["doctor", "--dump", str(tmp_path)]) == 2
    assert f"{tmp_path} contains no flight record: no call has failed" in capsys.readouterr().err


def test_doctor_names_a_file_that_is_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file of a full disk was "Expecting value: line 1 column 1", of no file."""
    (tmp_path / "0_rank0.json").write_text('{"rank": 0, "pg_con')
    assert main(["doctor", "--dump", str(tmp_path)]) == 2
    assert f"{tmp_path / '0_rank0.json'} is not a whole flight record" in capsys.readouterr().err
