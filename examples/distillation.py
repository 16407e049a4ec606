"""Distillation: a small network learns handwritten digits from a large one on a separate rank.

The last rank holds the teacher and computes answers while the students, on the other ranks, learn from the previous
batch. With one rank the teacher is in the student's process. Most images have no label: there only the teacher counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from .._console import Console
from ..collectives import all_reduce, broadcast
from ..datasets import digits
from ..patterns.distillation import Distillation, Regressor, cosine_loss, soft_target_loss
from ..training import DataPartitioner, GradientAverager

__all__: list[str] = []

_BATCH, _EPOCHS, _TOLERANCE, _LARGE, _SMALL, _LABELLED = 60, 15, 1e-5, 128, 16, 60
_METHODS = ("labels alone", "soft targets", "cosine of hidden states", "regressor of hidden states")

Pair = tuple[torch.Tensor, torch.Tensor]  # images and labels; or logits and hidden states


def run(console: Console) -> None:
    rank, size, threads = dist.get_rank(), dist.get_world_size(), torch.get_num_threads()
    torch.set_num_threads(1)  # for networks as small as these a second thread only costs time
    distillation = Distillation(classes=10, teachers=int(size > 1))
    students = size - distillation.teachers
    images, labels = digits().tensors
    chosen = [DataPartitioner(labels, [0.2, 0.8], seed=7).use(each).indices for each in (0, 1)]
    learned, held_out = ((images[each].flatten(1).double(), labels[each]) for each in chosen)
    batches = _batches(learned, _BATCH // students * students)
    _learn(teacher := Net(_LARGE), _answered(batches))
    for parameter in teacher.parameters():
        broadcast(parameter.data)
    few = torch.cat([learned[1][:_LABELLED], torch.full_like(learned[1][_LABELLED:], -100)])
    batches = _batches((learned[0], few), _BATCH // students * students)
    right = {f"the teacher ({_LARGE} hidden), all {len(few)} labels": [_right(teacher, held_out)]}
    for method, seed in product(_METHODS, range(3)):
        student = Net(_SMALL, method, seed)
        losses = torch.zeros(len(batches), dtype=torch.float64)
        if distillation.is_teacher:
            distillation.teach(teacher)
        else:
            averager = GradientAverager(student, group=distillation.students)
            mine = [(x.chunk(students)[rank], y.chunk(students)[rank]) for x, y in batches]
            with distillation.student(mine, None if distillation.teachers else teacher) as answered:
                losses = _learn(student, answered)
            averager.remove()
        all_reduce(losses)
        alone = _learn(Net(_SMALL, method, seed), _answered(batches, teacher)) if rank == 0 else losses / students
        error = float((losses / students - alone).abs().max())
        bound = _TOLERANCE if students > 1 else 0.0  # several students add in another order
        console.check(error <= bound, f"{method}, seed {seed}: {len(losses)} losses of one process, within {bound:g}")
        right.setdefault(f"a student ({_SMALL} hidden), {method}", []).append(_right(student, held_out))
    medians = torch.tensor([statistics.median(each) for each in right.values()])
    broadcast(medians)
    rows = [(name, f"{each:.1%}") for name, each in zip(right, medians.tolist(), strict=True)]
    console.table((f"network and method; students: {_LABELLED} labels", f"right of {len(held_out[1])}"), rows)
    console.check(bool(medians[2] > medians[1] + 0.1), "soft targets: accuracy at least 10 % above few labels")
    torch.set_num_threads(threads)


class Net(nn.Module):
    """A network that returns logits and its hidden state; ``method`` selects the loss of a student."""

    def __init__(self, hidden: int, method: str = "", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last, self.method = nn.Linear(64, hidden), nn.Linear(hidden, 10), method
        self.regressor = Regressor((hidden,), (_LARGE,)) if method.startswith("regressor") else None
        self.double()  # float64, so that rounding does not hide an error

    def forward(self, x: torch.Tensor) -> Pair:
        hidden = F.relu(self.first(x))
        return self.last(hidden), hidden

    def loss(self, batch: Pair, answer: Pair) -> torch.Tensor:
        logits, hidden = self(batch[0])
        loss = F.cross_entropy(logits, batch[1], reduction="sum") / len(logits)
        if self.regressor is not None:
            return loss + 0.25 * self.regressor.loss(hidden, answer[1])
        if self.method == "soft targets":
            return 0.25 * loss + 0.75 * soft_target_loss(logits, answer[0], temperature=2)
        return loss + 0.25 * cosine_loss(hidden, answer[1]) if self.method.startswith("cosine") else loss


def _learn(net: Net, answered: Iterable[tuple[Pair, Pair]]) -> torch.Tensor:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for batch, answer in answered:
        optimizer.zero_grad()
        losses.append(net.loss(batch, answer))
        losses[-1].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return torch.stack(losses).detach()


def _answered(batches: list[Pair], teacher: Net | None = None) -> Iterator[tuple[Pair, Pair]]:
    for batch in batches:
        yield batch, torch.no_grad()(teacher)(batch[0]) if teacher else batch


def _batches(images: Pair, count: int) -> list[Pair]:
    random = torch.Generator().manual_seed(0)
    orders = [torch.split(torch.randperm(len(images[0]), generator=random), count) for _ in range(_EPOCHS)]
    return [(images[0][each], images[1][each]) for order in orders for each in order if len(each) == count]


def _right(net: Net, images: Pair) -> float:
    return float((net(images[0])[0].argmax(1) == images[1]).double().mean())
