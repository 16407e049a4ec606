"""Distillation losses: distances of logits, of the direction of hidden states, and of feature maps.

No gradient goes to the teacher, even if its outputs require one.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

__all__: list[str] = []


def soft_target_loss(student: torch.Tensor, teacher: torch.Tensor, temperature: float = 2.0) -> torch.Tensor:
    """Kullback-Leibler divergence of the student's softmax from the teacher's, both of logits divided by
    ``temperature``, as a mean over the rows (Hinton et al. 2015).

    >>> soft_target_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[1000.0, 0.0]]), temperature=1.0)
    tensor(0.6931)

    A higher temperature raises the small probabilities, which show the classes that the teacher finds similar. The
    gradient decreases with the square of the temperature, so the loss is multiplied by the square: its weight relative
    to other losses stays the same.
    """
    if not temperature > 0:  # also refuses NaN
        raise ValueError(f"soft_target_loss: temperature={temperature} must be positive")
    if student.shape != teacher.shape:
        raise ValueError(
            f"soft_target_loss: the student's logits have shape {tuple(student.shape)}, the teacher's "
            f"{tuple(teacher.shape)}; both need the same classes of the same rows"
        )
    log_teacher = F.log_softmax(teacher.detach() / temperature, -1)
    log_student = F.log_softmax(student / temperature, -1)
    weights = log_teacher.exp()
    terms = torch.where(weights > 0, weights * (log_teacher - log_student), 0)  # the limit for a probability of 0
    return terms.sum(-1).mean() * temperature**2


def cosine_loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """One minus the cosine between the flattened hidden states of each sample, as a mean over the samples.

    >>> cosine_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 2.0, 0.0, 0.0]]))
    tensor(0.)

    A teacher's state that is k times as wide is first averaged over groups of k.
    """
    mine, its = student.flatten(1), teacher.detach().flatten(1)
    if len(mine) != len(its) or not mine.shape[1] or its.shape[1] % mine.shape[1]:
        raise ValueError(
            f"cosine_loss: the student's states have shape {tuple(student.shape)}, the teacher's {tuple(teacher.shape)}"
            "; give as many samples, and a teacher's width that is a multiple of the student's, or use a Regressor"
        )
    its = its.view(len(its), mine.shape[1], its.shape[1] // mine.shape[1]).mean(2)
    return (1 - F.cosine_similarity(mine, its.to(mine.dtype))).mean()


class Regressor(nn.Module):
    """A trained layer from the student's feature map to the teacher's, and their mean squared difference (FitNets,
    Romero et al. 2015).

    ``student`` and ``teacher`` are the shapes of one sample: (channels, height, width) for a convolution of 3 x 3, or
    (features,) for a linear layer. The layer's parameters are trained with the student's, and discarded afterwards.

    >>> regressor = Regressor((4, 8, 8), (6, 8, 8))
    >>> regressor(torch.ones(2, 4, 8, 8)).shape
    torch.Size([2, 6, 8, 8])
    >>> loss = regressor.loss(torch.ones(2, 4, 8, 8), torch.zeros(2, 6, 8, 8))
    """

    def __init__(self, student: tuple[int, ...], teacher: tuple[int, ...]) -> None:
        super().__init__()
        if len(student) not in (1, 3) or len(student) != len(teacher) or student[1:] != teacher[1:]:
            raise ValueError(
                f"Regressor: from {tuple(student)} to {tuple(teacher)}; give two times (features,), or two times "
                "(channels, height, width) of equal height and width; pool the larger map first"
            )
        self.layer: nn.Module = (
            nn.Linear(student[0], teacher[0])
            if len(student) == 1
            else nn.Conv2d(student[0], teacher[0], kernel_size=3, padding=1)
        )

    def forward(self, student: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(student)
        return found

    def loss(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """The mean squared difference between the regressor's output and the teacher's map."""
        found = self(student)
        if found.shape != teacher.shape:
            raise ValueError(
                f"Regressor: the student's map has shape {tuple(found.shape)} after the layer, the teacher's "
                f"{tuple(teacher.shape)}"
            )
        return F.mse_loss(found, teacher.detach())
