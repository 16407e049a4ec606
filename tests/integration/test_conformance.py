"""A part of PyTorch's own tests of its backends, run on "dist_prims"; the whole is integration/conformance/run.py."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, clean
from launching import run as run_to_its_end

RUNNER = ROOT / "tests/integration/conformance/run.py"
needs_expecttest = pytest.mark.skipif(
    importlib.util.find_spec("expecttest") is None, reason="the tests of PyTorch import it; pip install expecttest"
)

TESTS = [
    "test_all_gather_object_subgroup",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_unequal_split",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_send_recv_any_source",
    "test_Backend_enum_class",
    "test_all_gather_coalesced_with_empty",
    "test_all_reduce_full_group_max",
    "test_barrier_timeout_full_group",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_scatter_object_list",
    "test_isend",
    "test_get_rank_size_full_group",
    "test_send_recv_with_tag",
]


def conformance(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_to_its_end([sys.executable, str(RUNNER), "--ranks", "3", *options], clean(**environ), timeout=110)


@pytest.mark.slow
@needs_expecttest
def test_tests_of_pytorch_pass(tmp_path: Path) -> None:
    done = conformance("--tests", f"^({'|'.join(TESTS)})$", "--json", str(tmp_path / "results"))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results").read_text())
    assert {result["test"]: result["outcome"] for result in results} == dict.fromkeys(TESTS, "passed")


@needs_expecttest
@pytest.mark.slow
def test_a_backend_that_does_not_exist_fails() -> None:
    done = conformance("--backend", "nosuch", "--tests", "^test_all_reduce_sum$")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("error "), done.stdout
    assert "Unknown backend type nosuch" in done.stdout


@needs_expecttest
@pytest.mark.slow
def test_a_test_that_takes_too_long_is_killed_and_may_be_expected(tmp_path: Path) -> None:
    expected, left = tmp_path / "expected.txt", tmp_path / "left"
    expected.write_text("# late\ntest_all_reduce_sum: no test is so quick\n")
    left.mkdir()
    options = ["--timeout", "0.1", "--tests", "^test_all_reduce_sum$", "--expect", str(expected)]
    done = conformance(*options, TMPDIR=str(left))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("timeout "), done.stdout
    assert "(expected: no test is so quick)" in done.stdout
    assert not list(left.iterdir())
