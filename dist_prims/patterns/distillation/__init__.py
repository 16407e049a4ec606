"""Knowledge distillation: a small model, the student, learns outputs and hidden states of a large one, the teacher.

The losses are functions of the outputs of both, so any data-parallel training can use them. A teacher that slows the
student down, or does not fit beside it, gets ranks of its own: :class:`Distillation`.
"""

from .losses import Regressor, cosine_loss, soft_target_loss
from .messages import LessonFailed
from .roles import Distillation

__all__ = ["Distillation", "LessonFailed", "Regressor", "cosine_loss", "soft_target_loss"]
