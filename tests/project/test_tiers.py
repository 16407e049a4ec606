"""The tiers of the tests: which tests a run has, the seed, and the limits of what tests may cost."""

import os
import re
import subprocess
import sys
from pathlib import Path

import costs
import pytest
import tiers

TESTS = """
import pytest
def test_default(): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.slow
@pytest.mark.long(minutes=1)
def test_long(): pass
@pytest.mark.long(minutes=2)
@pytest.mark.parametrize("case", range(4))
def test_random(case, random_seed): assert random_seed == 20261127
@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", [pytest.param(0, marks=pytest.mark.slow), *range(1, 7)])
def test_sampled(case): pass
@pytest.mark.skipif(NO_WINDOW, reason="this torch has no windows")
def test_window(): pass
"""
SAMPLED, ALL_CASES = ({f"test_sampled[{case}]" for case in cases} for cases in ((1, 3, 6), range(7)))
LONG = {"test_long", *(f"test_random[{case}]" for case in range(4))}


class Runs:
    """Runs of pytest in a folder with tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        markers = 'markers = ["slow:", "sampled(cases):", "long(minutes):"]'
        (folder / "pyproject.toml").write_text(f'[tool.pytest.ini_options]\ntestpaths = ["tests"]\n{markers}\n')
        (folder / "tests").mkdir()
        self.write(no_window=True)

    def write(self, *, no_window: bool, more: str = "") -> None:
        (self._folder / "tests/test_it.py").write_text(TESTS.replace("NO_WINDOW", str(no_window)) + more)

    def __call__(self, *options: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "pytest", "-v", "-p", "tiers", "-p", "xdist", *options]
        environ = {**os.environ, "PYTHONPATH": str(Path(tiers.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            command, cwd=self._folder, env=environ, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def names_in(output: str) -> set[str]:
    return set(re.findall(r"^tests/test_it.py::(\S+) (?:PASSED|SKIPPED|FAILED)", output, re.MULTILINE))


def test_each_tier_has_its_tests(runs: Runs) -> None:
    assert names_in(runs()) == {"test_default", "test_window", *SAMPLED}
    assert names_in(runs("--all")) == {"test_default", "test_window", "test_slow", *ALL_CASES}
    assert names_in(runs("--long", "--seed", "20261127")) == LONG
    assert names_in(runs("tests/test_it.py::test_slow")) == {"test_slow"}


def test_a_failure_prints_the_command_with_its_seed(runs: Runs) -> None:
    output = runs("--long", "--seed", "5", "-n", "1", "-k", "3 or test_long", status=1)
    assert "./launch_scripts/test.sh 'tests/test_it.py::test_random[3]' --seed 5" in output
    assert "tier: long; seed: 5" in output


def test_only_long_tests_are_random(runs: Runs) -> None:
    runs.write(no_window=True, more="def test_today(random_seed): pass\n")
    assert "test_today uses random_seed" in runs(status=4)


def test_a_slice_is_drawn_by_the_seed_and_within_its_minutes() -> None:
    costs_of = {f"test{number}": 0.5 + number % 3 for number in range(50)}
    slices = [tiers.draw(costs_of, 5, seed) for seed in range(200)]
    assert slices == [tiers.draw(dict(reversed(costs_of.items())), 5, seed) for seed in range(200)]
    assert all(4.5 <= sum(map(costs_of.get, part)) <= 5 for part in slices)
    assert set.union(*slices) == set(costs_of)


def test_a_slice_is_run(runs: Runs) -> None:
    output = runs("--long", "--slice", "4.5", "--seed", "20261127")
    minutes = [1 if name == "test_long" else 2 for name in names_in(output)]
    assert 3 <= sum(minutes) <= 4
    assert "a slice of 4.5 minutes; seed: 20261127" in output
    assert "pass --long too" in runs("--slice", "4", status=4)


def test_the_smoke_tier_names_what_the_pinned_torch_skips(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs("--all")
    record = runs._folder / ".pytest_cache/v/dist_prims/skipped"
    assert "this torch has no windows" in record.read_text()
    record.write_text(re.sub('"torch": "[^"]*"', '"torch": "1.0"', record.read_text()))
    runs.write(no_window=False)
    output = runs("--smoke", "-n", "1")
    assert "ran 1 tests that 1.0 skips" in output
    assert "\ntests/test_it.py::test_window\n" in output


def test_a_smoke_tier_without_a_test_for_its_torch_fails(runs: Runs) -> None:
    """A test that skips itself is selected by its file only, which may be missing in the list."""
    runs.write(no_window=True, more="def test_body(): pytest.skip('this torch has no entry point')\n")
    runs("--all")
    record = runs._folder / ".pytest_cache/v/dist_prims/skipped"
    record.write_text(re.sub('"torch": "[^"]*"', '"torch": "1.0"', record.read_text()))
    assert "ERROR: not in the smoke tier: tests/test_it.py::test_body" in runs("--smoke", status=1)


def test_the_files_of_the_smoke_tier_exist() -> None:
    assert [name for name in tiers.SMOKE if not (Path(tiers.__file__).parents[1] / name).is_file()] == []


def test_a_folder_that_exceeds_its_limit_is_named() -> None:
    assert costs.too_many({"tests/cli": costs.Cost(9, 1.0, 1, 0)}) == []
    processes, groups = costs.LIMITS["tests/models"]
    (line,) = costs.too_many({"tests/models": costs.Cost(9, 1.0, processes, groups + 1)})
    assert f"tests/models cost {groups + 1} groups" in line
    (line,) = costs.too_many({"tests/new": costs.Cost(9, 1.0, 1, 0)})
    assert "tests/new cost 1 processes" in line
    assert "allows 0" in line
