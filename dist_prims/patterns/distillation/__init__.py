"""Knowledge distillation: a small model, the student, learns outputs and hidden states of a large one, the teacher.

The losses are functions of both models' outputs, so any data-parallel training can use them. :class:`Distillation`
puts a teacher that slows the student down, or does not fit beside it, on separate ranks.
"""

from .losses import Regressor, cosine_loss, soft_target_loss
from .messages import DistillationError
from .roles import Distillation

__all__ = ["Distillation", "DistillationError", "Regressor", "cosine_loss", "soft_target_loss"]
