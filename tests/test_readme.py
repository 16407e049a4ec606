"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dist_prims.schedules.catalogue import markdown_table
from dist_prims.schedules.pipelines import markdown_table as pipeline_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_run(number: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[number])
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [number for number, text in enumerate(PROGRAMS) if "dist_prims.init(" in text])
def test_programs_run_on_several_ranks(number: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[number])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "program.py"]
    done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_the_table_of_algorithms_is_fresh() -> None:
    table = README.partition("<!-- algorithms -->\n")[2].partition("<!-- /algorithms -->")[0]
    assert table.strip() == markdown_table().strip(), "paste what `python -m dist_prims algorithms --markdown` prints"


def test_the_table_of_pipelines_is_fresh() -> None:
    table = README.partition("<!-- pipelines -->\n")[2].partition("<!-- /pipelines -->")[0]
    assert table.strip() == pipeline_table().strip(), "paste what `python -m dist_prims pipeline` prints"


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
