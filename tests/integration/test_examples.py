"""The examples: each runs after it has been copied out, uses public names only, and is in a section of docs/."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import MPIRUN, clean, forked, free_port, needs_mpirun, run, run_forked

import dist_prims

ROOT = Path(__file__).parents[2]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
# Seconds of computing, or many processes: in the slow tier only.
HEAVY = ("compiled", "mixed_precision", "stream")
GUIDE = (ROOT / "docs/guide.md").read_text()
# The sections of the patterns that the guide lists: page, anchor and text.
LISTED = re.findall(r"^\| \[[^\]]+\]\((\w+\.md)#([\w-]+)\) .*examples/", GUIDE, re.MULTILINE)
SECTIONS = {
    f"{page}#{anchor}": text
    for page, anchor in LISTED
    for text in (ROOT / "docs" / page).read_text().split("\n## ")[1:]
    if text.partition("\n")[0].lower().replace(" ", "-") == anchor
}
# Examples whose ranks wait for each other by messages, and a line before which rank 1 fails.
FAILING = {
    "distillation": "            dist.send(teacher(images), student)",
    "ensemble": "        assert_near(gather(rows, counts), expected)",
    "parameter_server": "        dist.recv(message, 0)",
    "per_sample": "        largest, chosen = top(norms, items, 3)",
}


def torchrun(ranks: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options]


def run_copy(name: str, folder: Path, launcher: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Copy the example to ``folder`` and run it there."""
    shutil.copy(EXAMPLES[name], folder)
    return run([*launcher, f"{name}.py", *arguments], clean(OMP_NUM_THREADS="1"), timeout=110, cwd=folder)


def run_copy_forked(name: str, folder: Path, *arguments: str, ranks: int) -> None:
    run_forked(Path(shutil.copy(EXAMPLES[name], folder)), *arguments, ranks=ranks)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in HEAVY else []) for name in EXAMPLES if name != "elastic"],
)
def test_an_example_holds_on_two_ranks(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_copy_forked(name, tmp_path, ranks=2)
    out = capfd.readouterr().out
    assert out.strip(), "rank 0 prints nothing"
    if name == "survive":
        assert re.search(r"step 4: PeerDiedError\n[^$]*\[3, 3, 3, 3(, 2)+(, 3){4,}\]", out), out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["elastic", "uneven"])
def test_an_example_holds_under_torchrun(name: str, tmp_path: Path) -> None:
    done = run_copy(name, tmp_path, torchrun(2, "--max-restarts", "1"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "rank 0 prints nothing"
    if name == "elastic":
        assert "step 13\nattempt 1, 2 ranks: step 12\n" in done.stdout


@needs_mpirun
@pytest.mark.slow
def test_an_example_holds_under_mpirun(tmp_path: Path) -> None:
    done = run_copy("uneven", tmp_path, [str(MPIRUN), "-n", "2", sys.executable])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_holds_alone(name: str, tmp_path: Path) -> None:
    """In a fresh interpreter, where no other test has imported anything."""
    done = run_copy(name, tmp_path, [sys.executable])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "elastic"])
def test_an_example_holds_over_gloo_on_three_ranks(name: str, tmp_path: Path) -> None:
    run_copy_forked(name, tmp_path, "--backend", "gloo", ranks=3)


@pytest.mark.slow
def test_the_elastic_example_holds_over_gloo(tmp_path: Path) -> None:
    done = run_copy("elastic", tmp_path, torchrun(3, "--max-restarts", "1"), "--backend", "gloo")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_wrong_result_is_the_exit_status(tmp_path: Path) -> None:
    text = EXAMPLES["uneven"].read_text()
    (tmp_path / "wrong.py").write_text(text.replace("/ len(counts)", "/ 7"))
    done = run([*torchrun(2), "wrong.py"], clean(OMP_NUM_THREADS="1"), timeout=110, cwd=tmp_path)
    assert done.returncode != 0
    assert "DistributedDataParallel.join() differs from one process" in done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FAILING)
def test_a_rank_that_fails_in_an_example_is_named_by_the_other(name: str) -> None:
    line = FAILING[name]
    indent = " " * (len(line) - len(line.lstrip()))
    text = EXAMPLES[name].read_text().replace("parse_args()", "parse_args([])")
    assert text.count(line) == 1
    program = text.replace(line, f'{indent}assert dist.get_rank() != 1, "out of memory"\n{line}')
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    other, failed = forked(*((program, clean(RANK=str(rank), **place)) for rank in range(2)))
    assert "AssertionError: out of memory" in failed.stderr
    assert re.search(r"Peer(Died|Left)Error: rank 0: rank 1 ", other.stderr), other.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_says_what_it_shows(name: str) -> None:
    text = EXAMPLES[name].read_text()
    description = ast.get_docstring(ast.parse(text)) or ""
    assert len(text.splitlines()) <= 120
    assert 20 < len(description.splitlines()[0]) <= 120
    assert re.search(rf"torchrun --nproc-per-node \d .*\b{name}\.py", description)
    assert f"](../examples/{name}.py)" in GUIDE, "docs/guide.md does not list it"
    assert any(f"examples/{name}.py" in text for text in SECTIONS.values()), "no section names it"


def private_imports(tree: ast.Module) -> Iterator[str]:
    """Imports of private modules, and of names of dist_prims that no ``__all__`` contains."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dist_prims":
            names = {node.attr: node.attr in dist_prims.__all__}
        elif isinstance(node, ast.Import):
            names = {
                each.name: each.name == "dist_prims" or not each.name.startswith("dist_prims") for each in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            origin, ours = node.module or "", (node.module or "").partition(".")[0] == "dist_prims"
            public = importlib.import_module(origin).__all__ if ours else [each.name for each in node.names]
            packages = ["ops"] if origin == "dist_prims" else []
            names = {f"{origin}.{each.name}": each.name in [*public, *packages] for each in node.names}
        else:
            continue
        yield from (name for name, is_public in names.items() if not is_public or re.search(r"(^|\.)_[a-z]", name))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_imports_public_names_only(name: str) -> None:
    assert not [*private_imports(ast.parse(EXAMPLES[name].read_text()))]


@pytest.mark.parametrize(
    "line",
    [
        "import dist_prims.collectives.flat",
        "import torch._dynamo",
        "from dist_prims.collectives.flat import cut",
        "from dist_prims import collectives",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "import dist_prims; dist_prims.agreement",
    ],
)
def test_a_private_import_is_found(line: str) -> None:
    assert [*private_imports(ast.parse(line))]


@pytest.mark.parametrize("name", [f"{page}#{anchor}" for page, anchor in LISTED])
def test_a_section_has_one_picture_and_a_program(name: str) -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+\.svg)\)", SECTIONS[name])
    assert len(pictures) == 1, pictures
    assert xml.etree.ElementTree.parse(ROOT / "docs" / pictures[0]).getroot().tag.endswith("svg")
    assert "```python\n" in SECTIONS[name]
