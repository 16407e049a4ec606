"""Plans of pipelines: proved, priced as their cards say, refused where they are wrong, drawn."""

from __future__ import annotations

import importlib
import itertools
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_prims.schedules import ScheduleError
from dist_prims.schedules.pipelines import (
    Action,
    PipelineCard,
    PipelinePlan,
    Row,
    draw_gantt,
    markdown_table,
    pipeline_plan,
    pipeline_plans,
    pipeline_schedule,
    show,
    text_gantt,
    unregister,
)
from dist_prims.schedules.pipelines.cost import lower_bound
from dist_prims.schedules.pipelines.registry import lookup

NAMES = pipeline_plans()
CASES = st.tuples(st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 20))
SECONDS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.5])  # exact in binary, and so are their sums


@pytest.mark.parametrize("name", NAMES)
def test_every_size_verifies_and_costs_what_its_card_says(name: str) -> None:
    schedule = lookup(name)
    for ranks in range(1, 9):
        for num_microbatches in range(1, 21):
            for chunks in {schedule.stages_a_rank} | ({1, 3} if schedule.any_more else set()):
                plan = pipeline_plan(name, ranks, num_microbatches, chunks)
                plan.verify()
                case = f"{name}, {ranks} ranks, {num_microbatches} micro-batches, {chunks} stages a rank"
                cost = plan.cost()
                idle = [Fraction(cost.makespan) - Fraction(busy) for busy in cost.busy]
                assert idle == [schedule.card.evaluate("idle", ranks, num_microbatches, chunks)] * ranks, case
                assert cost.bubble == pytest.approx(float(schedule.card.bubble(ranks, num_microbatches, chunks))), case
                peaks = [schedule.card.evaluate("peak", ranks, num_microbatches, chunks, rank) for rank in range(ranks)]
                assert list(plan.peaks()) == peaks, case


@pytest.mark.parametrize(("ranks", "num_microbatches"), [(1, 1), (2, 8), (3, 5), (4, 4), (4, 8), (8, 32)])
def test_bubbles_are_those_of_the_papers(ranks: int, num_microbatches: int) -> None:
    """The formulas as published, not as on the cards."""
    p, m = ranks, num_microbatches

    def bubble(name: str, chunks: int | None = None) -> float:
        return pipeline_plan(name, p, m, chunks).cost().bubble

    assert bubble("fill_drain") == pytest.approx((p - 1) / (m + p - 1))  # Huang et al.
    assert bubble("1f1b") == pytest.approx((p - 1) / (m + p - 1))  # Narayanan et al.
    for chunks in (1, 2, 3):
        assert bubble("interleaved_1f1b", chunks) == pytest.approx((p - 1) / (chunks * m + p - 1))
    forward, grad, weight = 2.0, 3.0, 1.5  # Qi et al.: (p-1)(F+B-W), in no more memory than 1F1B's first rank
    found = pipeline_plan("zb_h1", p, m).cost(forward, grad, weight)
    assert found.makespan - found.busy[0] == pytest.approx((p - 1) * (forward + grad - weight))
    assert max(pipeline_plan("zb_h1", p, m).peaks()) == max(pipeline_plan("1f1b", p, m).peaks())
    if m >= 2 * p - 1:  # ZBV: no rank waits between its first action and its last
        assert pipeline_plan("zbv", p, m).cost().gap == 0


@settings(deadline=None, max_examples=60)
@given(ranks=st.integers(1, 8), more=st.integers(0, 12), f=SECONDS, b=SECONDS, w=SECONDS)
def test_the_bubble_of_zb_h1_whatever_its_parts_take(ranks: int, more: int, f: float, b: float, w: float) -> None:
    cost = pipeline_plan("zb_h1", ranks, ranks + more).cost(f, b, w)
    assert [cost.makespan - busy for busy in cost.busy] == [(ranks - 1) * max(f, b, f + b - w)] * ranks


def test_one_f_one_b_has_the_times_of_the_diagram() -> None:
    """0  1  2  3  4  5  6  7  8  9 10 11
    rank 0  F0 F1       BW0-- F2 BW1--    BW2--
    rank 1     F0 BW0-- F1 BW1-- F2 BW2--
    """
    rows = pipeline_plan("1f1b", 2, 3).cost().rows
    assert [(r.kind, r.micro, r.begin, r.end) for r in rows if r.rank == 0] == [
        ("F", 0, 0, 1),
        ("F", 1, 1, 2),
        ("BW", 0, 4, 6),
        ("F", 2, 6, 7),
        ("BW", 1, 7, 9),
        ("BW", 2, 10, 12),
    ]
    assert [(r.kind, r.micro, r.begin, r.end) for r in rows if r.rank == 1] == [
        ("F", 0, 1, 2),
        ("BW", 0, 2, 4),
        ("F", 1, 4, 5),
        ("BW", 1, 5, 7),
        ("F", 2, 7, 8),
        ("BW", 2, 8, 10),
    ]


@settings(deadline=None, max_examples=60)
@given(case=CASES, data=st.data())
def test_times_keep_every_rule(case: tuple[str, int, int], data: st.DataObject) -> None:
    """Whatever stages and messages take: needs first, one action at a time, nothing below the bound, nothing lost."""
    name, ranks, num_microbatches = case
    plan = pipeline_plan(name, ranks, num_microbatches)
    each = st.lists(SECONDS, min_size=plan.stages, max_size=plan.stages)
    times = {kind: data.draw(each) for kind in ("forward", "input_grad", "weight_grad")}
    transfer = data.draw(st.sampled_from([0.0, 0.5, 2.0]))
    cost = plan.cost(**times, transfer=transfer)
    assert {Action(*row[:3]) for row in cost.rows} == set(plan.places)
    end = {Action(*row[:3]): row.end for row in cost.rows}
    lanes: dict[int, list[Row]] = defaultdict(list)
    for row in cost.rows:
        lanes[row.rank].append(row)
        for needed in plan.needs(Action(*row[:3])):
            far = plan.rank_of[needed.stage] != row.rank
            assert row.begin >= end[needed] + (transfer if far else 0)
    for rank, lane in lanes.items():
        assert tuple(Action(*row[:3]) for row in lane) == plan.actions[rank]
        assert all(after.begin >= before.end for before, after in itertools.pairwise(lane))
    assert cost.makespan >= lower_bound(plan, **times, transfer=transfer)
    assert 0 <= cost.bubble < 1


@settings(deadline=None, max_examples=60)
@given(
    ranks=st.integers(1, 8),
    num_microbatches=st.integers(1, 20),
    f=SECONDS,
    b=SECONDS,
    w=SECONDS,
    t=st.sampled_from([0.0, 0.5]),
)
def test_the_better_schedule_is_never_slower(
    ranks: int, num_microbatches: int, f: float, b: float, w: float, t: float
) -> None:
    """Where stages are alike. A message that takes time may make 1F1B slower than fill and drain, which waits less."""
    spans = {name: pipeline_plan(name, ranks, num_microbatches).cost(f, b, w, t).makespan for name in NAMES}
    assert spans["zb_h1"] <= spans["1f1b"]
    if t == 0:
        assert spans["1f1b"] <= spans["fill_drain"]


@settings(deadline=None, max_examples=60)
@given(case=CASES)
def test_links_between_stages_are_in_order(case: tuple[str, int, int]) -> None:
    """What a stage sends to the next is consumed in the order of sending: so an executor may rely on it."""
    plan = pipeline_plan(*case)
    used: dict[tuple[str, int], list[int]] = defaultdict(list)
    for actions in plan.actions:
        for action in actions:
            for needed in plan.needs(action):
                if plan.rank_of[needed.stage] != plan.rank_of[action.stage]:
                    used[needed.kind, needed.stage].append(plan.places[needed][1])
    assert all(places == sorted(places) for places in used.values())


@settings(deadline=None, max_examples=100)
@given(case=CASES, data=st.data())
def test_a_plan_that_was_tampered_with_is_refused_or_still_right(
    case: tuple[str, int, int], data: st.DataObject
) -> None:
    """Two actions of a rank swapped: verify() says yes just when a brute-force run, one action at a time, ends."""
    plan = pipeline_plan(*case)
    rank = data.draw(st.integers(0, plan.ranks - 1))
    places = st.integers(0, len(plan.actions[rank]) - 1)
    one, two = data.draw(places), data.draw(places)
    order = list(plan.actions[rank])
    order[one], order[two] = order[two], order[one]
    changed = with_order(plan, rank, order)
    done: set[Action] = set()
    at = [0] * plan.ranks
    while movable := [
        r
        for r in range(plan.ranks)
        if at[r] < len(changed.actions[r]) and done >= {*plan.needs(changed.actions[r][at[r]])}
    ]:
        done.add(changed.actions[movable[0]][at[movable[0]]])
        at[movable[0]] += 1
    if len(done) == len(plan.places):
        changed.verify()
    else:
        with pytest.raises(ScheduleError, match="would deadlock"):
            changed.verify()


def with_order(plan: PipelinePlan, rank: int, order: list[Action]) -> PipelinePlan:
    actions = [tuple(order) if each == rank else old for each, old in enumerate(plan.actions)]
    return replace(plan, actions=tuple(actions))


def test_a_deadlock_names_the_actions_that_wait_for_each_other() -> None:
    plan = pipeline_plan("1f1b", 2, 2)
    f0, f1, b0, b1 = plan.actions[1][0], plan.actions[1][2], plan.actions[1][1], plan.actions[1][3]
    wrong = with_order(plan, 0, [Action("F", 0, 0), Action("BW", 0, 0), Action("F", 0, 1), Action("BW", 0, 1)])
    wrong.verify()  # slow, but right
    wrong = with_order(wrong, 1, [f0, f1, b0, b1])
    with pytest.raises(ScheduleError) as error:
        wrong.verify()
    assert str(error.value) == (
        "plan 1f1b would deadlock: rank 0, position 1: BW(stage 0, micro-batch 0) waits for BW(stage 1, "
        "micro-batch 0), which rank 1 does at position 2; rank 1, position 1: F(stage 1, micro-batch 1) waits for "
        "F(stage 0, micro-batch 1), which rank 0 does at position 2"
    )


def test_a_rank_that_waits_for_itself_is_named() -> None:
    plan = pipeline_plan("zb_h1", 1, 1)
    wrong = with_order(plan, 0, [Action("W", 0, 0), Action("F", 0, 0), Action("B", 0, 0)])
    with pytest.raises(
        ScheduleError, match=r"rank 0, position 0: W\(.*\) waits for B\(.*\), which the same rank does at position 2"
    ):
        wrong.verify()


def changed(plan: PipelinePlan, rank: int, at: int, *new: Action) -> PipelinePlan:
    """The action at a place replaced by others, or by none."""
    order = list(plan.actions[rank])
    order[at : at + 1] = new
    return with_order(plan, rank, order)


F, B, W, BW = (lambda stage, micro, kind=kind: Action(kind, stage, micro) for kind in ("F", "B", "W", "BW"))
SPLIT, WHOLE = pipeline_plan("zb_h1", 2, 2), pipeline_plan("1f1b", 2, 2)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (changed(WHOLE, 1, 3), "rank 1: stage 1, micro-batch 1 lacks BW, or B and W"),
        (changed(SPLIT, 1, 3), "rank 1: stage 1, micro-batch 1 lacks B"),
        (changed(SPLIT, 1, 5), "rank 1: stage 1, micro-batch 1 lacks W"),
        (changed(WHOLE, 0, 0), "rank 0: stage 0, micro-batch 0 lacks F"),
        (changed(WHOLE, 1, 3, BW(1, 0)), "rank 1, position 3: BW(stage 1, micro-batch 0) occurs twice"),
        (changed(WHOLE, 1, 3, BW(0, 1)), "rank 1, position 3: BW(stage 0, micro-batch 1) is on the wrong rank"),
        (changed(WHOLE, 1, 3, BW(1, 2)), "rank 1, position 3: BW(stage 1, micro-batch 2) is out of range"),
        (
            changed(WHOLE, 1, 3, BW(-1, 1)),
            "BW(stage -1, micro-batch 1) is out of range; stages are 0..1, micro-batches",
        ),
        (
            changed(WHOLE, 1, 3, Action("X", 1, 1)),
            "X(stage 1, micro-batch 1) has an unknown kind; kinds are F, B, W and BW",
        ),
        (changed(WHOLE, 1, 3, BW(1, 1), W(1, 1)), "has BW and W: a gradient would be counted twice"),
        (changed(SPLIT, 1, 3, B(1, 1), BW(1, 1)), "has BW and B: a gradient would be counted twice"),
        (replace(WHOLE, actions=WHOLE.actions[:1]), "actions has 1 ranks, but ranks=2"),
        (replace(WHOLE, rank_of=(0,)), "rank_of has 1 stages, but stages=2"),
        (replace(WHOLE, rank_of=(0, 2)), "stage 1 is on rank 2; ranks are 0..1"),
        (replace(WHOLE, num_microbatches=0), "ranks=2, num_microbatches=0; both must be at least 1"),
    ],
)
def test_wrong_plans_are_refused(plan: PipelinePlan, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(sentence)):
        plan.verify()


def test_a_stage_may_split_its_backward_while_another_does_not() -> None:
    actions = ((F(0, 0), BW(0, 0)), (F(1, 0), B(1, 0), W(1, 0)))
    plan = PipelinePlan("mixed", 2, 2, 1, (0, 1), actions)
    plan.verify()
    assert plan.cost(1, 2, 4).makespan == 1 + 1 + 2 + 6  # rank 0 does not wait for rank 1's W
    assert plan.peaks() == (1, 1)


def test_an_activation_is_held_until_its_weights_are_done() -> None:
    order = (F(0, 0), B(0, 0), F(0, 1), B(0, 1), W(0, 0), W(0, 1))
    assert PipelinePlan("late", 1, 1, 2, (0,), (order,)).peaks() == (2,)


def test_price_of_an_incomplete_plan_says_what_is_missing() -> None:
    missing = r"rank \d, position [01]: .* needs F\(stage 0, micro-batch 0\), which no rank does"
    with pytest.raises(ScheduleError, match=missing):
        changed(WHOLE, 0, 0).cost()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: pipeline_plan("1f2b", 2, 2), "unknown pipeline schedule '1f2b'; did you mean '1f1b'"),
        (lambda: pipeline_plan("1f1b", 0, 2), "pipeline 1f1b: ranks=0; it must be at least 1"),
        (lambda: pipeline_plan("1f1b", 2, 0), "pipeline 1f1b: num_microbatches=0; it must be at least 1"),
        (lambda: pipeline_plan("interleaved_1f1b", 2, 2, 0), "stages_a_rank=0; it must be at least 1"),
        (
            lambda: pipeline_plan("zbv", 4, 2, 1),
            "cut the model into 8 stages, or use a schedule for any number: inter",
        ),
        (
            lambda: WHOLE.cost(forward=[1, 2, 3]),
            "forward has shape (3,) for 2 stages; pass one number, or one for each stage",
        ),
        (lambda: WHOLE.cost(input_grad=-1), "input_grad=-1 must be a finite number of seconds >= 0"),
        (
            lambda: WHOLE.cost(weight_grad=[1, float("nan")]),
            "weight_grad=[1, nan] must be a finite number of seconds >= 0",
        ),
        (lambda: WHOLE.cost(transfer=-1), "transfer=-1 must be a finite number of seconds >= 0"),
        (lambda: text_gantt([], "nothing"), "gantt nothing: there are no rows to draw"),
        (lambda: text_gantt([("F", 0, 0, 2.0, 1.0, 0)]), "cannot be drawn"),
        (lambda: pipeline_plan("1f1b", 65, 1).draw("/nowhere.svg"), "a picture shows at most 64 ranks"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()  # type: ignore[operator]


def test_a_stage_that_needs_no_gradient_of_its_input() -> None:
    cost = pipeline_plan("zb_h1", 2, 4).cost(1, [0, 1], 1)
    assert cost.busy == (8, 12)


@pytest.mark.parametrize(("ranks", "num_microbatches"), [(30, 200), pytest.param(100, 1000, marks=pytest.mark.slow)])
def test_a_large_plan_verifies_and_costs_what_its_card_says(ranks: int, num_microbatches: int) -> None:
    plan = pipeline_plan("zb_h1", ranks, num_microbatches)
    plan.verify()
    assert plan.cost().makespan == 3 * num_microbatches + ranks - 1


def test_pictures_have_a_bar_for_every_action(tmp_path: Path) -> None:
    for name in NAMES:
        plan = pipeline_plan(name, 3, 5)
        root = ET.parse(plan.draw(tmp_path / f"{name}.svg")).getroot()
        bars = [each for each in root.iter() if each.tag.endswith("rect") and each.get("class")]
        assert len(bars) == len(plan.places)
        width = float(root.get("width", "0"))
        places = [(float(bar.get("x", "")), float(bar.get("width", ""))) for bar in bars]
        assert all(x >= 0 and x + wide <= width for x, wide in places)


def test_a_picture_shows_a_run_and_its_plan_in_one_scale(tmp_path: Path) -> None:
    """Recorded rows are plain tuples in seconds of some clock; both panels have one scale."""
    plan = pipeline_plan("1f1b", 2, 3)
    cost = plan.cost(0.010, 0.010, 0.010)
    recorded = [(r.kind, r.stage, r.micro, 7e5 + 2 * r.begin, 7e5 + 2 * r.end, r.rank) for r in cost.rows]
    root = ET.parse(draw_gantt(tmp_path / "both.svg", {"plan": cost.rows, "run <1>": recorded})).getroot()
    bars = [each for each in root.iter() if each.tag.endswith("rect") and each.get("class")]
    widths = [float(bar.get("width", "")) for bar in bars]
    assert sum(widths[len(cost.rows) :]) == pytest.approx(2 * sum(widths[: len(cost.rows)]), rel=1e-2)
    assert "run <1>" in {each.text for each in root.iter()}


def test_rows_that_overlap_are_drawn_where_they_begin() -> None:
    """The later row was drawn behind the end of the earlier one."""
    rows = [("F", 0, 0, 0.0, 10.0, 0), ("F", 0, 1, 5.0, 10.0, 0), ("F", 0, 1, 5.0, 10.0, 1)]
    first, second = text_gantt(rows).splitlines()
    assert first.index("F1") == second.index("F1")


@pytest.mark.parametrize(
    ("name", "ranks", "num_microbatches"),
    [("fill_drain", 2, 3), ("1f1b", 3, 4), ("interleaved_1f1b", 2, 4), ("zb_h1", 3, 5), ("zbv", 2, 3)],
)
def test_the_picture_beside_the_code_is_the_plan(name: str, ranks: int, num_microbatches: int) -> None:
    message = lookup(name).order.__module__
    text = importlib.import_module(message).__doc__ or ""
    shown = [line.strip().removesuffix("...").rstrip() for line in text.splitlines() if line.startswith("    rank")]
    drawn = text_gantt(pipeline_plan(name, ranks, num_microbatches).cost().rows).splitlines()
    assert len(shown) == ranks
    for here, line in zip(shown, drawn, strict=True):
        assert line.startswith(here), message
        assert line == here or "..." in text, message


def test_text_tells_stages_apart_where_a_rank_has_several() -> None:
    assert pipeline_plan("zbv", 1, 1).draw().splitlines()[1] == "rank 0  F0.0 F1.0 B1.0 W1.0 B0.0 W0.0"
    assert max(len(line) for line in pipeline_plan("zbv", 4, 90).draw().splitlines()) <= 208
    assert "zb_h1, 3 ranks, 3 stages, 2 micro-batches" in show("zb_h1", 3, 2)


def test_the_table_has_every_schedule() -> None:
    table = markdown_table().splitlines()
    assert len(table) == 2 + len(NAMES)
    assert all(row.count("|") == table[0].count("|") for row in table)


def test_a_new_schedule_takes_one_function() -> None:
    @pipeline_schedule("one by one", PipelineCard("one at a time", "3*m*(p-1)", "1", "never", "none"))
    def one_by_one(rank: int, ranks: int, num_microbatches: int, stages_a_rank: int) -> Iterator[Action]:
        for micro in range(num_microbatches):
            yield from (F(rank, micro), BW(rank, micro))

    try:
        plan = pipeline_plan("one by one", 3, 4)
        plan.verify()
        cost = plan.cost()
        assert cost.makespan - cost.busy[0] == lookup("one by one").card.evaluate("idle", 3, 4)
    finally:
        unregister("one by one")
    with pytest.raises(ValueError, match=r"pipeline schedule '1f1b' is one of dist_prims.* under another name"):
        pipeline_schedule("1f1b", lookup("1f1b").card)(one_by_one)
    with pytest.raises(ValueError, match=r"pipeline schedule '1f1b' is one of dist_prims.* can be removed"):
        unregister("1f1b")


def test_the_order_does_not_depend_on_what_was_imported_first() -> None:
    """The table of the documentation is in this order. A test of it failed where a module had been imported before."""
    program = """
import dist_prims.schedules.pipelines.zero_bubble
from dist_prims.schedules.pipelines import pipeline_plans
print(pipeline_plans())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == str(pipeline_plans()), done.stderr
