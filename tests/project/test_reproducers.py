"""The helper that runs reproducers of defects: a program that did not run does not count as a defect that is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
from reproducers import main


def test_a_missing_program_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"lacks backend/overlapping_buffers.py"):
        main(str(tmp_path), "overlapping_buffers")
    with pytest.raises(SystemExit, match="no program contains"):
        main(str(tmp_path), "of no program")


@pytest.mark.parametrize(("program", "status"), [("import dist_prims.nothing", 1), ("print('right')", 0)])
def test_a_program_that_cannot_run_shows_its_defect(
    program: str, status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "backend").mkdir()
    (tmp_path / "backend" / "overlapping_buffers.py").write_text(program)
    assert main(str(tmp_path), "overlapping_buffers") == status
    assert f"{status} defects show" in capfd.readouterr().out
