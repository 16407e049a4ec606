"""A small model, the student, learns from a large one, the teacher: what it says, and what it makes of its input.

The losses are plain functions of what both give, so any data-parallel training takes them. Where the teacher is so
large that it slows the student down, or does not fit beside it, it gets ranks of its own: :class:`Distillation`.
"""

from .losses import Regressor, cosine_loss, soft_target_loss
from .messages import LessonFailed
from .roles import Distillation

__all__ = ["Distillation", "LessonFailed", "Regressor", "cosine_loss", "soft_target_loss"]
