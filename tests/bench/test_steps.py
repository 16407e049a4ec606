"""What a step costs is measured of work that is real, and whose results are checked."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dist_prims
from dist_prims.bench import steps
from dist_prims.bench.report import environment
from dist_prims.bench.steps import Decoding, MeasuredTraining, Table, measure, report

SMALL_TRAINING: dict[str, Any] = {"layers": 2, "width": 32, "batch": 4}
SMALL_DECODING: dict[str, Any] = {"layers": 2, "hidden": 32, "inner": 8, "context": 4, "tokens": 3}


def small(groups: dict[str, dist.ProcessGroup | None]) -> list[Table]:
    works = MeasuredTraining(groups, **SMALL_TRAINING), Decoding(groups, **SMALL_DECODING)
    return [measure(work, 3, warmup=2) for work in works]


def test_all_contenders_are_timed_and_agree() -> None:
    def body() -> tuple[str, list[Table]]:
        facts = environment()
        found = small({name: dist.new_group(backend=name) for name in ("gloo", "dist_prims")})
        return report(facts, found), found

    (text, tables), (_, others) = dist_prims.spawn(body, 2, timeout=60)
    assert tables == others
    assert [table.agree for table in tables] == [True, True]
    assert [*tables[0].seconds] == ["none", "noop", "gloo", "dist_prims", "averager"]
    assert [*tables[1].seconds] == ["none", "gloo", "dist_prims"]
    assert all(len(each) == 3 and min(each) > 0 for table in tables for each in table.seconds.values())
    rows = [line.split()[:2] for line in text.splitlines() if not line.startswith("#")]
    assert rows == [[table.what, name] for table in tables for name in table.seconds]
    assert "ranks 2" in text
    assert text.endswith("# ddp: results agree\n# decode: results agree")


@pytest.mark.parametrize("order", [("gloo", "lazy"), ("lazy", "gloo"), ("lazy",)])
def test_a_group_that_sends_nothing_is_found_out(order: tuple[str, ...]) -> None:
    def body() -> list[bool]:
        alone, _ = dist.new_subgroups(group_size=1)
        return [table.agree for table in small({name: alone if name == "lazy" else None for name in order})]

    assert dist_prims.spawn(body, 2, timeout=60) == [[False, False]] * 2


def test_the_table_has_exposed_time_and_ratio() -> None:
    table = Table("decode", "token", 2, {"none": [2.0, 2.0, 9.0], "gloo": [6.0], "dist_prims": [3.0]}, True)
    assert table.median("none") == 1
    assert table.exposed("gloo") == 2
    assert table.ratio("dist_prims") == 0.25
    assert math.isnan(Table("ddp", "step", 1, {"none": [2.0], "gloo": [1.0]}, True).ratio("gloo"))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(steps, "Decoding", lambda groups: Decoding(groups, **SMALL_DECODING))
    command = ["--ranks", "2", "--steps", "2", "--what", "decode", "--json", str(tmp_path / "all.json")]
    assert steps.main(command) == 0
    assert "# decode: results agree" in capfd.readouterr().out
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["environment"]["ranks"] == 2
    assert [table["what"] for table in found["tables"]] == ["decode"]
    assert [*found["tables"][0]["contenders"]] == ["none", "gloo", "dist_prims"]


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        steps.main(["--what", "dpp"])
    assert "'dpp' is not a list of ddp or decode" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        steps.main(["--steps", "0"])
    assert "'0' is not a positive integer" in capsys.readouterr().err
