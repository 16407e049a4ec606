"""Distillation: a small network learns handwritten digits from a large one on a separate rank.

The last rank holds the teacher. A student requests the answer to batch t + 1 before it learns from batch t, so the
teacher computes meanwhile. With one rank the teacher is in the student's process. Most images have no label: there only
the teacher counts. The losses of the students are those of one process.

    torchrun --nproc-per-node 2 distillation.py --seed 0
"""

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import dist_prims
from dist_prims.datasets import digits

BATCH, EPOCHS, LARGE, SMALL, LABELLED, HEAT = 60, 15, 128, 16, 60, 2.0  # HEAT: the temperature of soft targets
METHODS = ("labels alone", "soft targets", "cosine of hidden states", "regressor of hidden states")


class Net(nn.Module):
    """A network that returns logits and its hidden state side by side; ``method`` selects the loss of a student."""

    def __init__(self, hidden: int, method: str = "", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last, self.method = nn.Linear(64, hidden), nn.Linear(hidden, 10), method
        self.regressor = nn.Linear(hidden, LARGE) if method.startswith("regressor") else None
        self.double()  # float64, so that rounding does not hide an error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first(x))
        return torch.cat([self.last(hidden), hidden], 1)

    def loss(self, images: torch.Tensor, labels: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        (logits, hidden), (soft, state) = (each.tensor_split([10], 1) for each in (self(images), answer))
        loss = F.cross_entropy(logits, labels, reduction="sum") / len(logits)
        if self.method == "soft targets":  # times HEAT squared, because the gradient decreases with the square
            divergence = F.kl_div((logits / HEAT).log_softmax(1), (soft / HEAT).softmax(1), reduction="batchmean")
            return 0.25 * loss + 0.75 * HEAT**2 * divergence
        if self.method.startswith("cosine"):
            pooled = F.avg_pool1d(state, LARGE // SMALL)  # to the width of the student
            return loss + 0.25 * (1 - F.cosine_similarity(hidden, pooled)).mean()
        return loss if self.regressor is None else loss + 0.25 * F.mse_loss(self.regressor(hidden), state)


def learn(net: Net, answered: Iterable[Any]) -> torch.Tensor:
    """Train on batches and the teacher's answers; return the losses."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for (images, labels), answer in answered:
        optimizer.zero_grad()
        losses.append(net.loss(images, labels, answer))
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach()


def answered_by(teacher: int, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[Any]:
    """Batches with the answers of rank ``teacher``, which works on the next batch while the caller uses this one."""
    asked: list[tuple[torch.Tensor, list[Any]]] = []
    for number, batch in enumerate(batches):
        for images, _ in batches[len(asked) : number + 2]:  # at the start two requests, then one ahead
            answer = images.new_empty(len(images), 10 + LARGE)
            asked.append((answer, [dist.isend(images, teacher), dist.irecv(answer, teacher)]))
        answer, works = asked[number]
        for work in works:
            work.wait()
        yield batch, answer


@torch.no_grad()
def teach(teacher: Net, students: int, count: int, steps: int) -> None:
    """Answer ``steps`` requests of ``count`` images from each student, in turn."""
    for _ in range(steps):
        for student in range(students):
            dist.recv(images := torch.empty(count, 64, dtype=torch.float64), student)
            dist.send(teacher(images), student)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the students")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    learners = dist.new_group([*range(students := max(size - 1, 1))])
    images, labels = digits().tensors
    chosen = [dist_prims.DataPartitioner(labels, [0.2, 0.8], seed=7).use(each).indices for each in (0, 1)]
    (x, y), (held_out, truth) = ((images[each].flatten(1).double(), labels[each]) for each in chosen)
    count = BATCH // students * students
    few = y.where(torch.arange(len(y)) < LABELLED, -100)  # -100: no label
    full, batches = ([*zip(x.split(count), part.split(count), strict=True)][:-1] * EPOCHS for part in (y, few))
    learn(teacher := Net(LARGE), [(batch, torch.empty(1, 10)) for batch in full])
    answered_here = [(batch, teacher(batch[0]).detach()) for batch in batches]
    for method in METHODS:
        student, losses = Net(SMALL, method, arguments.seed), torch.zeros(len(batches), dtype=torch.float64)
        if rank == students:
            teach(teacher, students, count // students, len(batches))
        else:
            averager = dist_prims.GradientAverager(student, group=learners)
            own = [(images.chunk(students)[rank], labels.chunk(students)[rank]) for images, labels in batches]
            losses = learn(student, answered_by(students, own) if size > 1 else answered_here)
            averager.remove()
        dist_prims.all_reduce(losses)
        if rank == 0:
            alone = learn(Net(SMALL, method, arguments.seed), answered_here)
            torch.testing.assert_close(losses / students, alone, rtol=0, atol=1e-5 * (students > 1))
            scores = [(net(held_out)[:, :10].argmax(1) == truth).double().mean() for net in (student, teacher)]
            print(f"{method:27}as in one process; accuracy {scores[0]:.1%}, the teacher's {scores[1]:.1%}")


if __name__ == "__main__":
    main()
