"""The compressor of an averager: made by its name or given, and used by one averager at a time."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

from ..compression import make
from ..compression.compressor import Compressor, Exact

if TYPE_CHECKING:
    from .averager import GradientAverager

__all__: list[str] = []

_OWNERS: weakref.WeakValueDictionary[int, GradientAverager] = weakref.WeakValueDictionary()  # by id of a compressor


def compressor_of(compress: str | Compressor | None) -> Compressor:
    """The compressor that the argument ``compress`` of an averager names."""
    if compress is None:
        return Exact()
    if isinstance(compress, str):
        return make(compress)
    return compress


def take(compressor: Compressor, averager: GradientAverager) -> None:
    """Make ``averager`` the one that uses this compressor."""
    _OWNERS[id(compressor)] = averager


def give_up(compressor: Compressor, averager: GradientAverager) -> None:
    """Let other averagers use the compressor, if this one does."""
    if _OWNERS.get(id(compressor)) is averager:
        del _OWNERS[id(compressor)]


def refuse_shared(compress: str | Compressor | None, rank: int, former: Collection[GradientAverager]) -> None:
    """ValueError if another averager uses the compressor: its error feedback would add one model's gradients to
    those of the other, silently where buckets have the same size."""
    owner = _OWNERS.get(id(compress))
    if owner is not None and owner not in former:
        raise ValueError(
            f"rank {rank}: GradientAverager: another averager uses this {type(compress).__name__}; give each averager "
            "its own compressor, or remove() the other one"
        )


def describe(compress: str | Compressor | None, compressor: Compressor) -> str:
    """The compressor as ranks compare it; with its arguments, unless it compares them itself later."""
    if isinstance(compress, str):
        return compress
    return repr(compressor) if hasattr(compressor, "agreed") else type(compress).__name__


def restart(compressor: Compressor) -> None:
    """Have the compressor begin as a new one, which new ranks have."""
    getattr(compressor, "restart", compressor.reset)()
