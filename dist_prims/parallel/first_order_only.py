"""A decorator for backwards without a second derivative, which raises where one is needed.

torch's ``once_differentiable`` raises only where the *incoming* gradient needs a gradient itself. For a loss that is a
plain sum it does not: then the second derivative would be silently omitted, and the result be wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__: list[str] = []


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward of a ``torch.autograd.Function`` that raises in a second derivative; put it below ``@staticmethod``.

    >>> class Double(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return 2 * x
    ...
    ...     @staticmethod
    ...     @once
    ...     def backward(ctx, grad):
    ...         return 2 * grad
    >>> x = torch.ones(1, requires_grad=True)
    >>> torch.autograd.grad(Double.apply(x), x)
    (tensor([2.]),)
    >>> torch.autograd.grad(Double.apply(x), x, create_graph=True)
    Traceback (most recent call last):
    RuntimeError: a second derivative is not offered here (create_graph=True)
    """
    plain: Callable[..., Any] = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # in a backward: only with create_graph
            raise RuntimeError("a second derivative is not offered here (create_graph=True)")
        return plain(ctx, *grads)

    return checked
