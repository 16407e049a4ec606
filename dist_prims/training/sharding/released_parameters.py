"""Parameters whose values have been released: reading one raises an error that names its unit and the remedy.

Between its uses a sharded parameter keeps shape, dtype and gradient, but all its elements are one NaN. A forward that
reads it outside its unit, such as a head that multiplies by the weight of an embedding in another unit, would compute
NaN without an error. An absent parameter therefore has its own class, whose ``__torch_function__`` torch calls before
every operation from Python. While it is gathered it is a plain ``Parameter``, so a forward has no additional cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ...torch_compat import tree_leaves, without_torch_function

__all__: list[str] = []

NO_COPY = (
    "ShardedParameters: a sharded model cannot be copied or pickled; copy it before sharding, call remove() first, or "
    "save state_dict() of ShardedParameters"
)

_READS_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}  # of the attributes
_METHODS = {"size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "data_ptr"}
_METHODS |= {"is_contiguous", "is_floating_point", "is_complex", "get_device", "untyped_storage", "requires_grad_"}
_METHODS |= {"register_hook", "register_post_accumulate_grad_hook", "__hash__", "__repr__", "__format__", "__len__"}


class AbsentParameter(torch.nn.Parameter):
    """A parameter without values, see :func:`make_absent`; ``absent_from`` names rank and unit for the error."""

    absent_from: str

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(NO_COPY)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not _reads_values(func):
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        absent = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, AbsentParameter))
        raise RuntimeError(
            f"{absent.absent_from}: {getattr(func, '__name__', func)} reads a parameter of shape {tuple(absent.shape)} "
            "that is not gathered now: the forward of its unit is not running. Make a unit of a module that "
            "contains all users of the parameter (units=[...]), or read it within gathered(); for the state of the "
            "whole model call state_dict() of ShardedParameters"
        )


def _reads_values(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") in _READS_VALUES
    return name not in _METHODS


def make_absent(parameter: torch.nn.Parameter, where: str) -> None:
    """Make operations on the parameter raise; a subclass of Parameter is not changed, and reads as NaN."""
    if type(parameter) is torch.nn.Parameter:
        parameter.__class__ = AbsentParameter
        parameter.absent_from = where  # type: ignore[attr-defined]


def make_present(parameter: torch.nn.Parameter) -> None:
    """Make it a plain parameter again."""
    if type(parameter) is AbsentParameter:
        parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]
