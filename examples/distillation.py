"""Distillation: a small network learns handwritten digits from a large one on a separate rank.

The last rank holds the teacher and computes answers while the students, on the other ranks, learn from the previous
batch. With one rank the teacher is in the student's process. Most images have no label: there only the teacher counts.
The losses of the students are those of one process.

    torchrun --nproc-per-node 2 distillation.py --seeds 3
"""

import argparse
import statistics
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import dist_prims
from dist_prims.datasets import digits
from dist_prims.patterns.distillation import Distillation, Regressor, cosine_loss, soft_target_loss

BATCH, EPOCHS, LARGE, SMALL, LABELLED = 60, 15, 128, 16, 60
METHODS = ("labels alone", "soft targets", "cosine of hidden states", "regressor of hidden states")

Pair = tuple[torch.Tensor, torch.Tensor]  # images and labels; or logits and hidden states


class Net(nn.Module):
    """A network that returns logits and its hidden state; ``method`` selects the loss of a student."""

    def __init__(self, hidden: int, method: str = "", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last, self.method = nn.Linear(64, hidden), nn.Linear(hidden, 10), method
        self.regressor = Regressor((hidden,), (LARGE,)) if method.startswith("regressor") else None
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


def learn(net: Net, answered: Iterable[tuple[Pair, Pair]]) -> torch.Tensor:
    """Train on batches and the teacher's answers; return the losses."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for batch, answer in answered:
        optimizer.zero_grad()
        losses.append(net.loss(batch, answer))
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach()


def answered_by(teacher: Net | None, batches: list[Pair]) -> Iterator[tuple[Pair, Pair]]:
    for batch in batches:
        yield batch, torch.no_grad()(teacher)(batch[0]) if teacher else batch


def batches_of(images: torch.Tensor, labels: torch.Tensor, count: int) -> list[Pair]:
    random = torch.Generator().manual_seed(0)
    orders = [torch.split(torch.randperm(len(images), generator=random), count) for _ in range(EPOCHS)]
    return [(images[each], labels[each]) for order in orders for each in order if len(each) == count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="students of each method")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    rank, distillation = dist.get_rank(), Distillation(classes=10, teachers=int(dist.get_world_size() > 1))
    students = dist.get_world_size() - distillation.teachers
    images, labels = digits().tensors
    chosen = [dist_prims.DataPartitioner(labels, [0.2, 0.8], seed=7).use(each).indices for each in (0, 1)]
    (x, y), (held_out, truth) = ((images[each].flatten(1).double(), labels[each]) for each in chosen)
    count = BATCH // students * students
    learn(teacher := Net(LARGE), answered_by(None, batches_of(x, y, count)))
    for parameter in teacher.parameters():
        dist_prims.broadcast(parameter.data)
    batches = batches_of(x, y.where(torch.arange(len(y)) < LABELLED, -100), count)  # -100: no label

    def accuracy(net: Net) -> float:
        return float((net(held_out)[0].argmax(1) == truth).double().mean())

    log = print if rank == 0 else lambda text: None
    log(f"students have {LABELLED} labels       accuracy on {len(truth)} images, median of {arguments.seeds}")
    log(f"{f'the teacher, all {len(y)} labels':30}{accuracy(teacher):6.1%}")
    for method in METHODS:
        results = []
        for seed in range(arguments.seeds):
            student, losses = Net(SMALL, method, seed), torch.zeros(len(batches), dtype=torch.float64)
            if distillation.is_teacher:
                distillation.teach(teacher)
            else:
                averager = dist_prims.GradientAverager(student, group=distillation.students)
                own = [(images.chunk(students)[rank], labels.chunk(students)[rank]) for images, labels in batches]
                with distillation.student(own, None if distillation.teachers else teacher) as answered:
                    losses = learn(student, answered)
                averager.remove()
            dist_prims.all_reduce(losses)
            if rank == 0:
                alone = learn(Net(SMALL, method, seed), answered_by(teacher, batches))
                torch.testing.assert_close(losses / students, alone, rtol=0, atol=1e-5 * (students > 1))
                results.append(accuracy(student))
        log(f"{method:30}{statistics.median(results or [0]):6.1%}")


if __name__ == "__main__":
    main()
