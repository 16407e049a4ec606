"""The comparison with other libraries: everything but the libraries, which need a network."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from dist_prims.bench.rivals import program
from dist_prims.bench.rivals.__main__ import _parser, main, table
from dist_prims.bench.rivals.launch import Failed, environment, run
from dist_prims.bench.rivals.libraries import CONTENDERS, build, holds
from dist_prims.bench.rivals.rounds import Figures, interleaved, once, per_round


def test_arguments_are_read_and_have_defaults() -> None:
    given = _parser().parse_args(["--ranks", "4", "--only", "gloo,mpich", "--cache", "x"])
    assert (given.ranks, given.only, given.cache, given.build, given.rounds) == (
        4,
        ["gloo", "mpich"],
        Path("x"),
        False,
        5,
    )
    usual = _parser().parse_args([])
    assert usual.only == list(CONTENDERS)
    assert usual.sizes == [8, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


@pytest.mark.parametrize("given", [["--only", "nccl"], ["--ranks", "0"], ["--rounds", "x"]])
def test_arguments_that_are_none(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(given)
    assert given[1] in capsys.readouterr().err


def test_each_contender_has_its_entry() -> None:
    assert {contender.opens for contender in CONTENDERS.values()} == set(program.OPENED)
    for contender in CONTENDERS.values():
        assert bool(contender.starter or contender.library) <= bool(contender.packages)


def test_contenders_run_in_turn_in_each_round() -> None:
    order = list(interleaved(["a", "b", "c"], 4))
    assert [name for _, name in order] == [*"abc", *"bca", *"cab", *"abc"]
    assert [round for round, _ in order] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert not list(interleaved([], 3))


def test_rounds_share_the_iterations() -> None:
    assert per_round(8, 5) == 3
    assert per_round(1 << 20, 5) == 13
    assert per_round(64 << 20, 100) == 3


def test_the_table_has_medians_and_names_what_is_missing() -> None:
    found = {
        "ours": {8: Figures([3e-6, 1e-6, 2e-6]), 1024: Figures([5e-6], wrong=7)},
        "theirs": {8: Figures([0.5])},
        "none": {},
    }
    facts = {"ranks": 2, "versions": {"theirs": "theirs 1.0"}}
    lines = table(found, [8, 1024], facts, {"none": "no environment"}).splitlines()
    assert lines[0].endswith("ranks 2")
    assert lines[1].split() == ["#", "bytes", "ours", "theirs"]
    assert lines[2].split() == ["8", "2.0", "500000.0"]
    assert lines[3].split() == ["1024", "5.0", "-"]
    assert len(lines[1]) == len(lines[2]) == len(lines[3])
    assert lines[4:] == ["# wrong elements: ours 7", "# theirs: theirs 1.0", "# without none: no environment"]


def test_a_wait_has_a_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(Failed, match=r"not done in 0.3 s; almost"):
        run([["sh", "-c", "echo almost; sleep 30 & sleep 30"]], 0.3, [dict(os.environ)])
    assert time.monotonic() - began < 10


def test_one_that_fails_ends_the_others() -> None:
    began = time.monotonic()
    failing = [sys.executable, "-c", "raise ValueError('why')"]
    with pytest.raises(Failed, match="ValueError: why"):
        run([failing, ["sleep", "30"]], 25, [dict(os.environ)] * 2)
    assert time.monotonic() - began < 15
    with pytest.raises(Failed, match="no-such-command"):
        run([["no-such-command"]], 5, [dict(os.environ)])


def test_the_environment_of_a_rival_has_one_thread() -> None:
    theirs = environment(Path("home"), {"OMP_NUM_THREADS": "3"})
    assert theirs["PATH"].startswith(f"{Path('home/bin')}{os.pathsep}")
    assert theirs["OMP_NUM_THREADS"] == "3"
    assert "PYTHONPATH" not in theirs
    assert environment(None, {})["OMP_NUM_THREADS"] == "1"


def test_a_folder_of_other_files_is_not_replaced(tmp_path: Path) -> None:
    home = tmp_path / "mpich"
    home.mkdir()
    (home / "kept").touch()
    assert holds("mpich", home) == []
    with pytest.raises(Failed, match="is not a Python environment"):
        build("mpich", home)
    assert (home / "kept").exists()


def test_a_rival_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "mpich", "--cache", str(tmp_path)]) == 0
    assert "# without mpich: no environment; --build creates it" in capsys.readouterr().out


@pytest.mark.slow
def test_the_own_contenders_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--only", "gloo,dist_prims", "--sizes", "8,256K", "--rounds", "1", "--seconds", "60"]
    assert main([*given, "--cache", str(tmp_path), "--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    assert "# wrong elements: 0" in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["missing"] == {}
    assert {(line["contender"], line["nbytes"]) for line in found["lines"]} == {
        (name, nbytes) for name in ("gloo", "dist_prims") for nbytes in (8, 256 << 10)
    }
    for line in found["lines"]:
        assert line["wrong"] == 0
        assert 0 < line["median"] < 10
        assert len(line["seconds"]) >= 1


def test_what_was_done_before_the_deadline_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def dies(commands: list[list[str]], *_: object) -> None:
        place = Path(commands[0][1]).parent
        line = json.dumps({"nbytes": 8, "seconds": [1.0, 2.0], "wrong": 0})
        (place / "rank-0.jsonl").write_text(f"{line}\n{line.replace('8', '16')}\n")
        (place / "rank-1.jsonl").write_text(f"{line.replace('1.0', '3.0')}\n{line[:9]}")
        raise Failed("why")

    monkeypatch.setattr("dist_prims.bench.rivals.rounds.run", dies)
    found, reason = once("gloo", tmp_path, 2, [8, 16], 0, 1, 5)
    assert reason == "why"
    assert {nbytes: figures.seconds for nbytes, figures in found.items()} == {8: [3.0, 2.0]}
    lines = table({"gloo": found}, [8, 16], {}, {"gloo": "ended in round 1: why"}).splitlines()
    assert lines[-1] == "# gloo: ended in round 1: why"
