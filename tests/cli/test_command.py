"""``python -m dist_prims`` as a user types it."""

from __future__ import annotations

import dataclasses
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import dist_prims
from dist_prims.cli import main
from dist_prims.schedules.pipelines import PipelinePlan, pipeline_plan

RIGHT = """
from dist_prims.schedules import Step, algorithm

@algorithm("all_reduce", name="mine", chunks=1)
def star(size):
    for rank in range(1, size):
        yield Step(src=rank, dst=0, chunk=0, reduce=True)
    for rank in range(1, size):
        yield Step(src=0, dst=rank, chunk=0)
"""
WRONG = RIGHT.replace("range(1, size)", "range(2, size)", 1)  # the sum misses rank 1
BROKEN = RIGHT.replace("dst=rank", "dst=[][rank]")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "dist_prims", *arguments]
    return subprocess.run(whole, capture_output=True, text=True, timeout=100, check=False)


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "ring.svg"
    assert main(["show", "all_reduce", "ring", "--size", "3", "--svg", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all_reduce ring, 3 ranks, 3 chunks, 4 steps"
    assert lines[7:] == [
        "starts   every rank: chunks 0-2, its own data",
        "ends     every rank: chunks 0-2, the sum over ranks 0..2",
        "steps    4 = 2*(n-1)",
        "sent     4/3 of the data by every rank; at most 2*(n-1)/n",
        "wins     large data, few ranks or slow links",
        "source   Patarasu and Yuan, Bandwidth optimal all-reduce algorithms, 2009",
        "adds     chunk 0 on rank 0: (r0+r1)+r2",
        f"picture  {picture}",
    ]
    assert "</svg>" in picture.read_text()


def test_show_takes_root_and_parameters_in_any_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "reduce", "binomial", "--size", "4", "--root", "2"]) == 0
    out = capsys.readouterr().out
    assert "root 2" in out
    assert "adds     chunk 0 on rank 2: " in out
    assert "sent     of the data: 1 by ranks 0-1,3; 0 by rank 2; " in out
    for arguments in (["hosts=3,1", "inner=direct", "--size", "4"], ["--size", "4", "hosts=3,1", "inner=direct"]):
        assert main(["show", "all_reduce", "hierarchical", *arguments]) == 0
        assert "hosts (3, 1), inner direct" in capsys.readouterr().out


def test_show_tells_the_cost_of_what_is_too_big_for_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "broadcast", "binomial", "--size", "64"]) == 0
    out = capsys.readouterr().out
    assert "a picture shows at most 32 ranks" in out
    assert "steps    6 = L" in out


def test_showing_waits_for_no_torch() -> None:
    code = "import sys; from dist_prims.cli import main; main(['show', 'scan', 'recursive_doubling'])\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_prove_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(RIGHT)
    done = command("prove", str(file))
    assert (done.returncode, done.stdout) == (0, "✓ all_reduce mine: 33 schedules, sizes 1-33\n"), done.stderr
    file.write_text(WRONG)
    done = command("prove", str(file))
    assert done.returncode == 1
    assert done.stdout == (
        "✗ all_reduce mine, size 2: ScheduleError: at the end rank 0, chunk 0: r1 is missing. It cannot be "
        "repaired after step 0: there the transfer from rank 0 to rank 1 "
        "replaces the last copy of r1, in chunk 0 of rank 1\n"
        "  for a page that opens at the wrong step, show it with --size 2 --html wrong.html\n"
    )
    file.write_text(BROKEN)
    done = command("prove", str(file), "--sizes", "1,4")
    assert done.returncode == 1
    assert done.stdout == "✗ all_reduce mine, size 4: IndexError: list index out of range\n"
    assert "in star" in done.stderr
    file.write_text(BROKEN + RIGHT.replace("mine", "yours"))
    done = command("prove", str(file), "--sizes", "1,4")
    assert done.returncode == 1
    assert done.stdout.endswith("✓ all_reduce yours: 2 schedules, sizes 1,4\n"), "the others are proved too"
    file.write_text("")
    done = command("prove", str(file))
    assert done.returncode == 2
    assert "registers no algorithm" in done.stderr


def test_prove_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "--sizes", "1-5,8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("✓") and line.endswith(("sizes 1-5,8", "micro-batches 1-12")) for line in lines)
    assert "✓ pipeline 1f1b: 144 plans, ranks and micro-batches 1-12" in lines
    assert "✓ all_reduce swing: 6 schedules, sizes 1-5,8" in lines


def test_prove_verifies_the_plans_of_pipelines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_wrong_order(name: str, ranks: int, num_microbatches: int) -> PipelinePlan:
        plan = pipeline_plan(name, ranks, num_microbatches)
        return dataclasses.replace(plan, actions=tuple(actions[::-1] for actions in plan.actions))

    monkeypatch.setattr("dist_prims.cli.prove.pipeline_plan", in_wrong_order)
    assert main(["prove", "--sizes", "1"]) == 2
    assert "plan fill_drain would deadlock: rank 0, position 0" in capsys.readouterr().err


def test_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.svg"
    assert main(["pipeline", "1f1b", "--ranks", "2", "--microbatches", "2", "--svg", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "pipeline 1f1b, 2 ranks, 2 stages, 2 micro-batches"
    assert "time  9 units, lower bound 6; ranks are idle 33.3 % of it" in lines
    assert lines[-1] == f"picture  {picture}"
    assert "</svg>" in picture.read_text()
    assert main(["pipeline"]) == 0
    assert "| `zb_h1` |" in capsys.readouterr().out


def test_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "all_gather"]) == 0
    out = capsys.readouterr().out
    assert "bruck" in out
    assert "n: ranks" in out
    assert main(["algorithms", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| collective |")
    assert main(["algorithms", "scan", "--markdown"]) == 0
    assert "all_reduce" not in capsys.readouterr().out
    assert main(["show"]) == 0
    assert {"halving_doubling", "bruck", "dissemination"} <= {*capsys.readouterr().out.split()}
    assert main(["show", "all_reduce"]) == 0
    out = capsys.readouterr().out
    assert "halving_doubling" in out
    assert "broadcast" not in out


def test_recommend_recommends_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "--hosts", "3", "--ranks", "4", "--bytes", "64M", "--link", "8G"]) == 0
    head, table, reasons = capsys.readouterr().out.split("\n\n")
    assert head.splitlines() == [
        "all_reduce of 64 MB: 3 hosts x 4 ranks; assumed: latency, inner link, inner latency, reducing",
        "within a host: 1 µs a message, 80 Gbit/s a rank each way",
        "between hosts: 10 µs a message, 8 Gbit/s a host each way",
        "reducing: 10 GB/s",
    ]
    first, *others, last = table.splitlines()[1:]
    assert first.startswith("hierarchical inner=")
    assert "link" in first
    assert first.endswith("85.3 MB")  # 2 * 2/3 of the data over each link; a ring of 12 ranks: 2 * 11/12
    assert any(line.startswith("ring ") and line.endswith("117 MB") for line in others)
    assert last.split() == ["lower", "bound", "89.5", "ms"]
    assert reasons.startswith("Use hierarchical inner=")
    assert "times the lower bound" in reasons


def test_recommend_takes_a_calibration_and_other_collectives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "here.json"
    level = '{"alpha": 1e-6, "beta": 1e-9}'
    file.write_text(f'{{"inner": {level}, "outer": {level}, "gamma": 0, "cores": 2, "one_machine": true}}')
    assert (
        main(["recommend", "--hosts", "2", "--ranks", "2", "--collective", "barrier", "--calibration", str(file)]) == 0
    )
    out = capsys.readouterr().out
    assert f"barrier: 2 hosts x 2 ranks; {file}" in out
    assert "cores: 2 for all hosts" in out
    assert ": 4 µs predicted" in out  # 2 steps, each 4 messages on 2 cores


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "all_reduce", "rign"], "did you mean 'ring'?"),
        (["show", "al_reduce", "ring"], "did you mean 'all_reduce'"),
        (["algorithms", "al_gather"], "did you mean 'all_gather'"),
        (["show", "all_reduce", "ring", "speed"], "'speed' is not a parameter; write name=value"),
        (["show", "all_reduce", "ring", "speed=2"], "takes no parameter 'speed'"),
        (["show", "all_reduce", "ring", "--root", "1"], "takes no parameter 'root'"),
        (["show", "all_reduce", "ring", "--size", "0"], "size"),
        (
            ["show", "all_reduce", "hierarchical", "--size", "4", "hosts=3,3"],
            "hosts=(3, 3) must be the number of ranks of each host",
        ),
        (["show", "all_reduce", "ring", "--svg", "x.png"], "as SVG only; name the file x.svg"),
        (["pipeline", "1f1b", "--svg", "x.png"], "as SVG only; name the file x.svg"),
        (["show", "all_reduce", "ring", "--svg", "no/such/folder/x.svg"], "No such file"),
        (["prove", "no_such_file.py"], "No such file"),
        (["recommend", "--hosts", "0"], "both must be at least 1"),
        (["recommend", "--bytes", "100 M"], "'100 M' is not a size; write 512, 16K, 1M or 2G"),
        (["recommend", "--link", "fast"], "'fast' is not a link speed"),
        (["recommend", "--link", "0G"], "'0G' is not a link speed"),
        (["recommend", "--latency", "10"], "'10' is not a duration; write 500ns, 10us or 1.5ms"),
        (["recommend", "--collective", "al_reduce"], "did you mean 'all_reduce'"),
        (["recommend", "--calibration", "no_such_file.json"], "No such file"),
        (["recommend", "--calibration", "pyproject.toml"], "pyproject.toml: Expecting value"),
        (
            ["recommend", "--calibration", "x.json", "--inner-link", "1G"],
            "--calibration and --inner-link: one or the other",
        ),
        (["prove", "--sizes", "4-2"], "'4-2' is not a number of ranks; write for example 1-8 or 2,4,8"),
        (["show", "all_reduce", "hierarchical", "hosts=x"], "hosts=('x',) must be the number of ranks of each host"),
        (["show", "all_reduce", "hierarchical", "hosts=3,x"], "hosts=(3, 'x') must be the number of ranks"),
        (["show", "all_reduce", "tree", "chunks=x"], "tree: chunks='x'; it must be a whole number, such as 4, its"),
        (["show", "all_reduce", "tree", "chunks=1,2"], "chunks=(1, 2); it must be a whole number"),
        (["show", "all_gather", "bruck", "radix=x"], "radix='x'; it must be a whole number, such as 2"),
        (["show", "all_gather", "pat", "aggregate=1.5"], "'1.5'; it must be a whole number, at least 1 chunk a messa"),
        (["show", "all_gather", "pat", "aggregate=1,2"], "aggregate=(1, 2); it must be a whole number"),
        (["show", "all_reduce", "hierarchical", "inner=3"], "inner=3; it must be a name, such as 'ring', its default"),
        (["show", "all_reduce", "hierarchical", "outer=ring,ring"], "outer=('ring', 'ring'); it must be a name"),
        (["show", "broadcast", "binomial", "root=x"], "broadcast binomial: root='x'; it must be a whole number"),
        (["show", "all_reduce", "ring", "size=3"], "'size=3' is not a parameter of an algorithm; write show COLLECT"),
        (["show", "all_reduce", "ring", "collective=3"], "'collective=3' is not a parameter"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert len(err.splitlines()) == 1
    assert not out or "--svg" in arguments  # the picture comes last


def test_a_mistake_is_the_exit_status() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"dist_prims {dist_prims.__version__}\n")
    done = command("show", "all_reduce", "rign")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert command("show", "all_reduce", "ring", "--sise", "3").returncode == 2


def test_show_takes_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(RIGHT)
    for arguments in ([str(file)], [str(file), "mine"], [str(file), "--size", "3", "mine"]):
        done = command("show", *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("all_reduce mine, ")
    done = command("show", str(file), "other")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "registers mine; name one of them" in done.stderr


@pytest.mark.parametrize("what", ["prove", "show"])
@pytest.mark.parametrize("text", ["def f(:", "import no_such_module", "1 / 0", "raise SystemExit(0)"])
def test_a_file_that_cannot_be_run_is_one_line(
    what: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.py"
    file.write_text(f"\n{text}\n")
    assert main([what, str(file)]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "line 2" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dist_prims", "recommend", "--hosts", "x"], "invalid int value: 'x'"),
        (["dist_prims.bench", "--algorithms", "rng"], "did you mean 'ring'"),
        (["dist_prims.bench", "--backends", "gloop"], "did you mean 'gloo'"),
        (["dist_prims.bench", "--collective", "all_gather", "--limits"], "--limits measures all_reduce only"),
    ],
)
def test_wrong_arguments_are_reported_before_a_rank_meets_another(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where a launcher has set its variables."""
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    errors = capfd.readouterr().err
    assert ended.value.code == 2
    assert words in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--hosts 2 --ranks 2", "chooses by the same prices"),
        ("--hosts 1 --ranks 2", "works in shared memory on one host; dist_prims.all_reduce(..., algorithm="),
        (
            "--hosts 2 --ranks 2 --collective all_to_all",  # for which it once advised a schedule that never ran
            "sends each block straight to its receiver unless another algorithm takes 0.6",
        ),
        (
            "--hosts 2 --ranks 2 --collective scan",
            "uses no schedule for scan; dist_prims.scan(..., algorithm='recursive_doubling')",
        ),
        ("--hosts 2 --bytes 8K", "needs no schedule"),
        ("--hosts 4 --ranks 1 --bytes 64K --link 1G --collective broadcast", "so the backend uses a schedule"),
    ],
)
def test_recommend_tells_whether_the_backend_takes_the_advice(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recommend", *arguments.split()]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["--hosts 2 --bytes 1M", "--hosts 5 --bytes 1K"])
def test_recommend_names_no_agreement_with_which_no_data_travels(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recommend", *arguments.split()]) == 0
    assert "agree on the call" not in capsys.readouterr().out
