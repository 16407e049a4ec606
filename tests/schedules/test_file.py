"""Schedules as files: what is saved is what is loaded, and a file that is wrong is refused by a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_prims.schedules import COLLECTIVES, Schedule, ScheduleError, algorithms, build
from dist_prims.schedules.contract import ROOTED
from dist_prims.schedules.steps import COLUMNS


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_loaded_schedule_is_the_one_that_was_saved(collective: str, tmp_path: Path) -> None:
    for name in algorithms(collective):
        for size in (1, 4, 5):
            schedule = build(collective, name, size, **({"root": size - 1} if collective in ROOTED else {}))
            if name == "naive_ring":  # whose ranks may end with different bits
                assert not schedule.contract.same_bits
            found = Schedule.load(schedule.save(tmp_path / "one.json"))
            assert repr(found) == repr(schedule)
            assert [step.rows() for step in found.steps] == [step.rows() for step in schedule.steps]
            assert found.save(tmp_path / "two.json").read_text() == (tmp_path / "one.json").read_text()


def test_parameters_are_saved(tmp_path: Path) -> None:
    found = Schedule.load(
        build("broadcast", "hierarchical", 5, hosts=(2, 3), outer="chain").save(tmp_path / "one.json")
    )
    assert found.parameters == (("hosts", (2, 3)), ("outer", "chain"))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another format": ({"format": "dist_prims schedule 9"}, 'no field "format" of the value'),
    "no number": ({"size": "3"}, "size='3': it must be int"),
    "no collective": ({"collective": "all_reduced"}, "unknown collective 'all_reduced'"),
    "no rank": ({"size": 0}, "size=0, scratch=0, root=None: they do not fit all_reduce"),
    "a root": ({"root": 1}, "root=1: they do not fit all_reduce"),
    "chunks": ({"chunks": 0}, "cannot be split into 0 chunks"),
    "no columns": ({"steps": [{"src": [0]}]}, "step 0: 'dst'; it must have the columns src, dst"),
    "fractions": ({"steps": [{name: [0.5] for name in COLUMNS}]}, "step 0: .*integers"),
    "one number": ({"steps": [dict.fromkeys(COLUMNS, 0)]}, "step 0: "),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_is_wrong_is_refused(case: str, tmp_path: Path) -> None:
    path = build("all_reduce", "ring", 3).save(tmp_path / "ring.json")
    change, message = WRONG[case]
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=f"ring.json: .*{message}"):
        Schedule.load(path)


def test_a_file_of_lists_in_lists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 1_000_000)
    with pytest.raises(ValueError, match="maximum recursion depth exceeded"):
        Schedule.load(tmp_path / "deep.json")


def test_a_file_without_a_field_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = build("all_reduce", "ring", 3).save(tmp_path / "ring.json")
    fields = json.loads(path.read_text())
    for text, message in ((json.dumps({**fields, "steps": None}), "steps=None"), ("[1]", "format"), ("{", "Expecting")):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"ring.json: .*{message}"):
            Schedule.load(path)
    del fields["root"]
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="the field 'root' is missing"):
        Schedule.load(path)


def test_steps_that_are_wrong_are_refused(tmp_path: Path) -> None:
    path = build("all_reduce", "ring", 3).save(tmp_path / "ring.json")
    path.write_text(path.read_text().replace("true, true, true", "true, true, false", 1))
    with pytest.raises(ScheduleError, match="at the end rank"):
        Schedule.load(path)
