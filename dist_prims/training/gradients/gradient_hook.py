"""The hook that is called when autograd has added to the gradient of a parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from ...torch_compat import without_torch_function

__all__: list[str] = []


def hook_gradient(parameter: torch.Tensor, call: Callable[[torch.Tensor], None]) -> RemovableHandle | None:
    """Call ``call(parameter)`` after each change of its gradient; None for a parameter that can have none.

    The hook is also on a frozen parameter, which may be unfrozen later.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> handle = hook_gradient(weight, lambda parameter: print(parameter.grad))
    >>> (2 * weight).sum().backward()
    tensor([2.])
    """
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return None
    frozen = not parameter.requires_grad
    with without_torch_function():  # a parameter of a lazy module refuses both methods before the first forward
        parameter.requires_grad_(True)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(call)
        if frozen:
            parameter.requires_grad_(False)
    return handle
