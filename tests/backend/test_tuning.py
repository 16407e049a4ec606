"""Figures that were measured: kept for each type of machine, and ignored on another, with a notice."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest
from launching import clean, run

from dist_prims.backend import tuning
from dist_prims.backend.tuning import CALIBRATION, ONE_SHOT_BYTES, TUNING, tuned
from dist_prims.cli import main

LIMITS = {"one_shot_bytes": {"2": 4096}}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DIST_PRIMS_TUNING", "DIST_PRIMS_CALIBRATION", "DIST_PRIMS_QUIET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    tuning._print_once.cache_clear()
    return tmp_path / "dist_prims"


def on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "machine", lambda: "Another Processor, CPUs 64, cores 32, sockets 1, NUMA nodes 4")
    monkeypatch.setattr(socket, "gethostname", lambda: "node2")


def test_the_file_says_where_it_was_measured(home: Path) -> None:
    path = TUNING.write(LIMITS)
    assert path.parent == home
    assert path.name.startswith("tuning-")
    assert [file.name for file in home.iterdir()] == [path.name]
    found = json.loads(path.read_text())
    assert found["machine"] == tuning.machine()
    assert found["host"]
    assert found["one_shot_bytes"] == {"2": 4096}
    assert (tuned(2), tuned(3)) == (4096, ONE_SHOT_BYTES)


def test_a_measurement_of_another_machine_is_ignored_with_a_warning(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = TUNING.write(LIMITS)
    on_another_machine(monkeypatch)
    assert tuned(2) == ONE_SHOT_BYTES
    said = capsys.readouterr().err
    assert said.startswith(f"dist_prims: {first}: ignored, measured on another type of machine, or by a version")
    assert "this is node2 (Another Processor, CPUs 64" in said
    assert said.endswith("measure here with: python -m dist_prims tune\n")
    tuned(2)
    assert capsys.readouterr().err == "", "once is enough"
    TUNING.write({"one_shot_bytes": {"2": 8192}})
    assert tuned(2) == 8192
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home.parent))
    assert tuned(2) == 4096
    assert capsys.readouterr().err == ""


def test_a_file_that_the_user_names_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = CALIBRATION.write({"gamma": 1}, tmp_path / "mine.json")
    monkeypatch.setenv("DIST_PRIMS_CALIBRATION", str(path))
    here, host = tuning.machine(), socket.gethostname()
    assert (CALIBRATION.read() or {})["gamma"] == 1
    on_another_machine(monkeypatch)
    assert CALIBRATION.read(warn=False) is None
    assert capsys.readouterr().err == ""
    assert CALIBRATION.read() is None
    said = capsys.readouterr().err
    assert f"{path} is ignored: it was measured on {host} ({here}), and this is node2 (Another" in said
    assert "measure here with: python -m dist_prims.bench calibrate" in said
    monkeypatch.setenv("DIST_PRIMS_QUIET", "1")
    tuning._print_once.cache_clear()
    assert CALIBRATION.read() is None
    assert capsys.readouterr().err == ""


def test_a_file_of_an_older_version(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not say where it was measured: by its old name in a home that may be shared it does not count."""
    home.mkdir()
    old = home / "tuning.json"
    old.write_text(json.dumps(LIMITS))
    assert tuned(2) == ONE_SHOT_BYTES
    assert (
        f"{old}: ignored, measured on another type of machine, or by a version that did not" in capsys.readouterr().err
    )
    monkeypatch.setenv("DIST_PRIMS_TUNING", str(old))
    assert tuned(2) == 4096
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["[]", "{}", '{"one_shot_bytes": {"4": 1}}', '{"one_shot_bytes": {"2": "x"}}'])
def test_without_a_measurement_the_default_holds(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DIST_PRIMS_TUNING", str(tmp_path / "tuning.json"))
    (tmp_path / "tuning.json").write_text(text)
    assert tuned(2) == ONE_SHOT_BYTES
    assert capsys.readouterr().err == ""


def test_a_file_that_the_variable_names_and_that_is_missing_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong path in the variable had no effect, without a word; the user's own file may be missing."""
    assert tuned(2) == ONE_SHOT_BYTES
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("DIST_PRIMS_TUNING", str(home / "wrong.json"))
    assert tuned(2) == ONE_SHOT_BYTES
    said = capsys.readouterr().err
    assert said.startswith(f"dist_prims: DIST_PRIMS_TUNING={home / 'wrong.json'} is ignored: No such file or directory")


def test_a_file_that_is_no_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tuning.json").write_text("not JSON")
    monkeypatch.setenv("DIST_PRIMS_TUNING", str(tmp_path / "tuning.json"))
    assert tuned(2) == ONE_SHOT_BYTES
    assert "is ignored: it is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("config", ["", "relative"])
def test_a_folder_that_the_specification_ignores(config: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", config)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = TUNING.file()
    assert path is not None
    assert path.parent == tmp_path / ".config" / "dist_prims"


def test_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(
        Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory."))
    )
    assert TUNING.file() is None
    assert tuned(2) == ONE_SHOT_BYTES
    with pytest.raises(OSError, match="there is no home folder for the measurements; set DIST_PRIMS_TUNING to a file"):
        TUNING.check_writable()


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    path = tmp_path / "file" / "tuning.json"
    monkeypatch.setenv("DIST_PRIMS_TUNING", str(path))
    monkeypatch.setenv("DIST_PRIMS_CALIBRATION", str(path))
    assert main(["tune", "--ranks", "2"]) == 1
    error = capfd.readouterr().err
    assert f"tune: the measurements cannot be written to {path}: " in error
    assert "; set DIST_PRIMS_TUNING to a file that can be written\n" in error


@pytest.mark.slow
def test_ranks_of_a_launcher_do_not_measure_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    path = tmp_path / "file" / "tuning.json"
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*ranks, "-m", "dist_prims.bench", "calibrate"], clean(DIST_PRIMS_CALIBRATION=str(path)))
    assert done.returncode != 0
    assert f"error: the measurements cannot be written to {path}: " in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        ("processor : 0\nmodel name\t: Intel(R)  Xeon(R) 8481C\n", "Intel(R) Xeon(R) 8481C"),
        ("processor : 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n", f"{os.uname().machine} 0x41 0xd40"),
        ("processor : 0\ncpu : POWER9, altivec supported\n", "POWER9, altivec supported"),
        ("", os.uname().machine),
    ],
)
def test_processors(cpuinfo: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_read", lambda path: cpuinfo if path == Path("/proc/cpuinfo") else "0")
    found = tuning.machine.__wrapped__()
    assert found.startswith(f"{model}, CPUs {os.cpu_count()}, cores 1, sockets 1, NUMA nodes ")
