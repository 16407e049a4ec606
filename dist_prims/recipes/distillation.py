"""Distillation: a small net learns handwritten digits from a large one that has a rank of its own.

The last rank holds the teacher and answers while the students, on the other ranks, learn from the batch before; with
one rank the teacher sits beside the student.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from .._console import Console
from ..collectives import all_reduce, broadcast
from ..datasets import digits
from ..training import DataPartitioner, GradientAverager
from ..training.distillation import Distillation, Regressor, cosine_loss, soft_target_loss

__all__ = ["run"]

_BATCH, _EPOCHS, _TOLERANCE, _LARGE, _SMALL = 60, 30, 1e-5, 128, 8
_WAYS = ("labels alone", "soft targets", "cosine of hidden states", "regressor of hidden states")

Pair = tuple[torch.Tensor, torch.Tensor]  # images and labels; or logits and hidden states


def run(console: Console) -> None:
    rank, size, threads = dist.get_rank(), dist.get_world_size(), torch.get_num_threads()
    torch.set_num_threads(1)  # nets as small as these only wait for a second one
    distillation = Distillation(classes=10, teachers=int(size > 1))
    students = size - distillation.teachers
    images, labels = digits().tensors
    parts = DataPartitioner(labels, [0.2, 0.8], seed=7)
    chosen = [parts.use(each).indices for each in (0, 1)]
    learned, held_out = ((images[each].flatten(1).double(), labels[each]) for each in chosen)
    batches = _batches(learned, _BATCH // students * students)
    teacher = Net(_LARGE)
    _learn(teacher, _answered(batches))
    for parameter in teacher.parameters():
        broadcast(parameter.data)
    rows = [(f"the teacher ({_LARGE} hidden), labels", _accuracy(teacher, held_out))]
    for way in _WAYS:
        student = Net(_SMALL, way)
        losses = torch.zeros(len(batches), dtype=torch.float64)
        if distillation.is_teacher:
            distillation.teach(teacher)
        else:
            averager = GradientAverager(student, group=distillation.students)
            mine = [(x.chunk(students)[rank], y.chunk(students)[rank]) for x, y in batches]
            with distillation.lessons(mine, None if distillation.teachers else teacher) as lessons:
                losses = _learn(student, lessons)
            averager.remove()
        all_reduce(losses)
        twin = _learn(Net(_SMALL, way), _answered(batches, teacher)) if rank == 0 else losses / students
        apart = float((losses / students - twin).abs().max())
        near = _TOLERANCE if students > 1 else 0.0  # more than one student add in another order
        console.check(apart <= near, f"{way}: all {len(losses)} losses are one process's, within {near:g}")
        rows.append((f"a student ({_SMALL} hidden), {way}", _accuracy(student, held_out)))
    console.table(("who learnt from what", f"of {len(held_out[1])} images right"), rows)
    torch.set_num_threads(threads)


class Net(nn.Module):
    """Gives logits and its hidden state; a student's loss goes by its way of learning."""

    def __init__(self, hidden: int, way: str = "") -> None:
        super().__init__()
        torch.manual_seed(hidden)
        self.first, self.last, self.way = nn.Linear(64, hidden), nn.Linear(hidden, 10), way
        self.regressor = Regressor((hidden,), (_LARGE,)) if way.startswith("regressor") else None
        self.double()  # so that only what is wrong differs from the single process

    def forward(self, x: torch.Tensor) -> Pair:
        hidden = F.relu(self.first(x))
        return self.last(hidden), hidden

    def loss(self, batch: Pair, said: Pair) -> torch.Tensor:
        logits, hidden = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        if self.regressor is not None:
            return loss + 0.25 * self.regressor.loss(hidden, said[1])
        if self.way == "soft targets":
            return 0.25 * loss + 0.75 * soft_target_loss(logits, said[0], temperature=4)
        return loss + 0.25 * cosine_loss(hidden, said[1]) if self.way.startswith("cosine") else loss


def _learn(net: Net, lessons: Iterable[tuple[Pair, Pair]]) -> torch.Tensor:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for batch, said in lessons:
        optimizer.zero_grad()
        loss = net.loss(batch, said)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def _answered(batches: list[Pair], teacher: Net | None = None) -> Iterator[tuple[Pair, Pair]]:
    """Batches, each with what a teacher beside the student says of it."""
    for batch in batches:
        with torch.no_grad():
            said = teacher(batch[0]) if teacher else batch
        yield batch, said


def _batches(images: Pair, count: int) -> list[Pair]:
    found = []
    for epoch in range(_EPOCHS):
        order = torch.randperm(len(images[0]), generator=torch.Generator().manual_seed(epoch))
        found += [(images[0][each], images[1][each]) for each in order[: len(order) // count * count].view(-1, count)]
    return found


def _accuracy(net: Net, images: Pair) -> str:
    return f"{float((net(images[0])[0].argmax(1) == images[1]).double().mean()):.1%}"
