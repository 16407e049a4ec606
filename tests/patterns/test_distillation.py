"""Distillation: its losses against the tutorial's formulas, and teachers on ranks of their own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_ranks import REASON, device, on_two_ranks
from torch import nn
from torch.nn import functional as F

import dist_prims
from dist_prims import GradientAverager
from dist_prims.errors import MismatchError
from dist_prims.launch import RankFailedError
from dist_prims.patterns.distillation import Distillation, DistillationError, Regressor, cosine_loss, soft_target_loss

GROUPS = [  # ranks, teachers among them, batches ahead, backend
    (2, 1, 0, "dist_prims"),
    (2, 1, 1, "gloo"),
    (3, 1, 3, "gloo"),
    (4, 2, 1, "dist_prims"),
    (4, 1, 0, "gloo"),
]


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.floats(0.5, 20), st.integers(0, 99))
def test_soft_targets(rows: int, classes: int, temperature: float, seed: int) -> None:
    torch.manual_seed(seed)
    student = torch.randn(rows, classes, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(rows, classes, dtype=torch.float64, requires_grad=True)
    soft, log = F.softmax(teacher.detach() / temperature, 1), F.log_softmax(student / temperature, 1)
    right = F.kl_div(log, soft, reduction="batchmean") * temperature**2
    found = soft_target_loss(student, teacher, temperature)
    torch.testing.assert_close(found, right)
    (expected,) = torch.autograd.grad(right, student)
    found.backward()
    torch.testing.assert_close(student.grad, expected)
    assert teacher.grad is None
    assert abs(float(soft_target_loss(teacher, teacher, temperature))) < 1e-12


def test_soft_targets_of_extreme_and_masked_logits() -> None:
    student = torch.tensor([[0.0, 0.0, float("-inf")]], requires_grad=True)
    loss = soft_target_loss(student, torch.tensor([[1000.0, 0.0, float("-inf")]]), 1.0)
    loss.backward()
    torch.testing.assert_close(loss, torch.log(torch.tensor(2.0)))
    assert student.grad.tolist() == [[-0.5, 0.5, 0.0]]


def test_hidden_states_and_feature_maps() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(4, 2, 3, requires_grad=True), torch.randn(4, 12)
    pooled = F.avg_pool1d(teacher, 2)
    right = F.cosine_embedding_loss(student.flatten(1), pooled, torch.ones(4))
    torch.testing.assert_close(cosine_loss(student, teacher), right)
    for shapes in (((3, 4, 4), (5, 4, 4)), ((3,), (5,))):
        regressor = Regressor(*shapes)
        mine, its = torch.randn(2, *shapes[0], requires_grad=True), torch.randn(2, *shapes[1], requires_grad=True)
        loss = regressor.loss(mine, its)
        torch.testing.assert_close(loss, (regressor(mine) - its).square().mean())
        loss.backward()
        assert mine.grad is not None
        assert its.grad is None
        assert all(each.grad is not None for each in regressor.parameters())


def test_losses_refuse_what_does_not_fit() -> None:
    for words, call in [
        (
            r"student's logits have shape \(2, 3\), the teacher's \(2, 4\)",
            lambda: soft_target_loss(torch.ones(2, 3), torch.ones(2, 4)),
        ),
        ("temperature=0 must be positive", lambda: soft_target_loss(torch.ones(2, 3), torch.ones(2, 3), 0)),
        ("temperature=nan must", lambda: soft_target_loss(torch.ones(2, 3), torch.ones(2, 3), float("nan"))),
        (r"shape \(2, 3\), the teacher's \(2, 4\)", lambda: cosine_loss(torch.ones(2, 3), torch.ones(2, 4))),
        (r"from \(3, 4, 4\) to \(3, 8, 8\)", lambda: Regressor((3, 4, 4), (3, 8, 8))),
        (
            r"has shape \(2, 5\) after the layer, the teacher's \(2, 6\)",
            lambda: Regressor((3,), (5,)).loss(torch.ones(2, 3), torch.ones(2, 6)),
        ),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


def net(seed: int, hidden: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 5)).double()


def data(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(9)
    return [
        (torch.randn(12, 6, generator=random).double(), torch.randint(5, (12,), generator=random)) for _ in range(count)
    ]


def learn(student: nn.Module, answered: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(student.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for (inputs, labels), says in answered:
        logits = student(inputs)
        loss = 0.25 * soft_target_loss(logits, says, 3.0) + 0.75 * F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def alone(count: int) -> tuple[list[torch.Tensor], nn.Module]:
    teacher, student = net(1, 32), net(2, 4)
    with torch.no_grad():
        answered = [(batch, teacher(batch[0])) for batch in data(count)]
    return learn(student, answered), student


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("size", "teachers", "ahead", "backend"), GROUPS)
def test_the_run_of_a_single_process(size: int, teachers: int, ahead: int, backend: str) -> None:
    """One student on a rank of its own: the same bits. Several: the same losses but for the order of additions."""

    def body() -> None:
        distillation = Distillation(5, teachers, ahead=ahead)
        if distillation.is_teacher:
            assert distillation.students is None
            mine = distillation.students_of(dist.get_rank())
            assert distillation.teach(net(1, 32)) == 6 * len(mine)
            return
        students = size - teachers
        part = [tuple(each.chunk(students)[dist.get_rank()] for each in batch) for batch in data(6)]
        student = net(2, 4)
        averager = GradientAverager(student, group=distillation.students)
        with distillation.student(part) as answered:
            losses = torch.stack(learn(student, answered))
        averager.remove()
        dist.all_reduce(losses, group=distillation.students)
        right, twin = alone(6)
        if students == 1:
            assert losses.tolist() == [float(each) for each in right]
            assert all(torch.equal(a, b) for a, b in zip(student.parameters(), twin.parameters(), strict=True))
        torch.testing.assert_close(losses / students, torch.stack(right), rtol=1e-9, atol=1e-9)

    dist_prims.spawn(body, size, timeout=60, backend=backend)


def test_students_are_assigned_to_teachers_in_turn() -> None:
    def body() -> None:
        distillation = Distillation(5, 3)
        assert [distillation.students_of(teacher) for teacher in (4, 5, 6)] == [[0, 3], [1], [2]]
        assert [distillation.teacher_of(student) for student in range(4)] == [4, 5, 6, 4]
        assert distillation.is_teacher == (dist.get_rank() >= 4)

    dist_prims.spawn(body, 7, timeout=120)


@pytest.mark.parametrize("ahead", [0, 2])
def test_uneven_batches_end_cleanly(ahead: int) -> None:
    """Students with no, one and five batches, of several sizes; one stops before it has all."""
    counts = [5, 0, 1]

    def body() -> None:
        rank = dist.get_rank()
        distillation = Distillation(3, ahead=ahead)
        for _ in range(2):  # and the group can do it again
            if distillation.is_teacher:
                distillation.teach(lambda x: x * 2)
                continue
            batches = [(torch.full((number, 3), float(rank * 10 + number)),) for number in range(counts[rank])]
            with distillation.student(batches) as answered:
                answers = [(float(batch[0].sum()), float(says.sum())) for batch, says in answered]
            assert answers == [(float(batch[0].sum()), 2 * float(batch[0].sum())) for batch in batches]
            with pytest.raises(RuntimeError, match="iterate within"):
                next(iter(answered))
        if distillation.is_teacher:
            distillation.teach(lambda x: x)
        else:
            with distillation.student([(torch.ones(2, 3),)] * 5) as answered:
                for number, _ in enumerate(answered):
                    if number == rank:
                        break
        dist_prims.barrier()

    dist_prims.spawn(body, 4, timeout=60)


def test_several_outputs_and_requests_of_numbers() -> None:
    """Teachers that have the data are asked with numbers of samples, and say two things of several dtypes."""

    def body() -> None:
        images = torch.arange(24.0).view(8, 3)
        distillation = Distillation(3)
        if distillation.is_teacher:
            distillation.teach(lambda numbers, scale: (images[numbers] * scale, images[numbers].half().t()))
            return
        batches = [torch.tensor([1, 5]), torch.tensor([7])]
        with distillation.student(batches, ask=lambda batch: (batch, torch.tensor(2.0))) as answered:
            for batch, (logits, states) in answered:
                assert torch.equal(logits, images[batch] * 2)
                assert torch.equal(states, images[batch].half().t())

    dist_prims.spawn(body, 2, timeout=60)


def test_a_teacher_without_ranks_and_in_a_subgroup() -> None:
    def body() -> None:
        groups = [dist.new_group([0, 2]), dist.new_group([1])]
        group = groups[dist.get_rank() % 2]
        distillation = Distillation(5, teachers=int(group.size() == 2), group=group)
        if distillation.is_teacher:
            distillation.teach(net(1, 32))
            return
        student = net(2, 4)
        teacher = net(1, 32) if group.size() == 1 else None
        with distillation.student(data(3), teacher) as answered:
            losses = learn(student, answered)
        assert distillation.students.size() == 1
        assert losses == alone(3)[0]

    dist_prims.spawn(body, 3, timeout=60)


def outcome(distillation: Distillation, teacher: Callable[..., Any], fails_at: int = -1) -> str:
    """What a rank has seen go wrong."""
    try:
        if distillation.is_teacher:
            distillation.teach(teacher)
        else:
            with distillation.student([(torch.ones(2, 3),)] * 6) as answered:
                for number, _ in enumerate(answered):
                    if number == fails_at:
                        raise ArithmeticError("the loss is nan")
    except (DistillationError, RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return "well"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ahead", "backend"), [(0, "dist_prims"), (1, "gloo"), (3, "dist_prims")])
def test_what_fails_on_one_side_reaches_the_other(ahead: int, backend: str) -> None:
    def body() -> list[str]:
        rank = dist.get_rank()
        distillation = Distillation(3, ahead=ahead)
        calls = 0

        def tired(x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return x if calls < 4 else x.view(7)

        seen = [
            outcome(distillation, tired),
            outcome(distillation, lambda x: x, fails_at=2 if rank == 1 else -1),
            outcome(distillation, lambda x: x[:, :2]),
            outcome(distillation, lambda x: "no tensor"),
            outcome(distillation, lambda x: [x] * 200),
            outcome(distillation, lambda x: x),
        ]
        dist_prims.barrier()
        return seen

    def teacher_failed(text: str) -> bool:
        return text.startswith("DistillationError: rank 2, a teacher, failed")

    one, two, teacher = dist_prims.spawn(body, 3, timeout=60, backend=backend)
    assert all(teacher_failed(text) for text in (one[0], two[0]))
    assert "shape '[7]' is invalid" in one[0]
    assert two[1] == "ArithmeticError: the loss is nan"
    assert one[1] == teacher[1] == "DistillationError: rank 1, a student, failed: ArithmeticError: the loss is nan"
    assert "logits of shape (2, 2), and its students have 3 classes" in one[2]
    assert one[2] == two[2]
    assert "answer is str; give a tensor" in two[3]
    assert "200 tensors are too many for one message" in one[4]
    assert one[5] == two[5] == teacher[5] == "well"


def test_other_classes_and_wrong_calls_are_refused_on_every_rank() -> None:
    def body() -> None:
        rank = dist.get_rank()
        with pytest.raises(MismatchError, match=r"Rank 0 has Distillation.classes=10.*rank 2 has .*classes=7"):
            Distillation(7 if rank == 2 else 10)
        with pytest.raises(MismatchError, match=r"ahead=1.*ahead=2"):
            Distillation(10, ahead=1 + rank // 2)
        with pytest.raises(ValueError, match="teachers at most half of the ranks"):
            Distillation(10, teachers=2)
        distillation = Distillation(10)
        with pytest.raises(ValueError, match=r"teach\(\) is for" if rank < 2 else r"student\(\) is for students"):
            _ = distillation.teach(nn.ReLU()) if rank < 2 else distillation.student([])
        with pytest.raises(ValueError, match="give each student its own teacher"):
            Distillation(10, teachers=0).student([])
        dist_prims.barrier()

    dist_prims.spawn(body, 3, timeout=60)


@pytest.mark.parametrize("step", [3, 5])
def test_a_student_that_fails_while_the_other_averages(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher waits for student 0, which waits for student 1: no rank receives the report, and yet the run ends."""
    monkeypatch.setattr("dist_prims.patterns.distillation.student._REPORT_TIMEOUT", timedelta(seconds=0.2))

    def body() -> None:
        distillation = Distillation(5)
        if distillation.is_teacher:
            distillation.teach(net(1, 8))
            return
        student = net(2, 4)
        GradientAverager(student, group=distillation.students)
        with distillation.student(data(6)) as answered:
            for number, ((inputs, _), says) in enumerate(answered):
                if number == step and dist.get_rank() == 1:
                    raise ArithmeticError("the loss is nan")
                soft_target_loss(student(inputs), says).backward()

    with pytest.raises(RankFailedError, match="the loss is nan") as seen:
        dist_prims.spawn(body, 3, timeout=60)
    assert seen.value.rank == 1


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_the_students_have_the_backend_and_timeout_of_the_group(backend: str) -> None:
    def body() -> None:
        distillation = Distillation(5)
        if distillation.students is not None:
            assert dist.get_backend(distillation.students) == backend
            if backend == "gloo":
                options = distillation.students._get_backend(torch.device("cpu")).options
                assert options._timeout == dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
        with pytest.raises(MismatchError, match="device=gpu"):
            Distillation(5, device="gpu" if dist.get_rank() else "cpu")

    dist_prims.spawn(body, 2, timeout=50, backend=backend)


def distilling_on_devices() -> None:
    distillation = Distillation(3, device=device())
    if distillation.is_teacher:
        distillation.teach(lambda x: x * 2)
        return
    with distillation.student([(torch.ones(2, 3, device=device()),)] * 3) as answered:
        assert [says.sum().item() for _, says in answered] == [12.0] * 3


@pytest.mark.gpu
@pytest.mark.skipif(bool(REASON), reason=REASON or "there is CUDA")
def test_messages_on_devices() -> None:
    on_two_ranks(distilling_on_devices)
