"""Error feedback: what compression loses of a gradient is added to the next one.

A compressor that always drops the small values never moves their parameters; one that rounds to nearest pulls all of
them the same way. If what was lost is kept and added to the next gradient, the sum of what has arrived never differs
from the sum of what was computed by more than one step's loss (Seide et al. 2014; Karimireddy et al. 2019).

>>> feedback, sent = Feedback(), []
>>> for _ in range(4):
...     corrected = feedback.add("bucket 0", torch.tensor([0.25]))
...     sent.append(corrected.round())
...     feedback.keep("bucket 0", corrected, sent[-1])
>>> [int(value) for value in sent]  # rounded by itself, each would be 0
[0, 0, 1, 0]
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

__all__: list[str] = []


class Feedback:
    """The errors of compression, by key; ``enabled=False`` keeps nothing."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._lost: dict[Hashable, torch.Tensor] = {}

    def add(self, key: Hashable, value: torch.Tensor) -> torch.Tensor:
        """Add the earlier error to ``value``, in place, and return it: the corrected value."""
        lost = self._lost.get(key)
        if lost is None:
            return value
        if lost.shape != value.shape:
            raise ValueError(
                f"error feedback: what was lost at {key} has {lost.numel()} elements and the gradient there has now "
                f"{value.numel()}; call reset() when buckets are rebuilt, and give each averager its own compressor"
            )
        return value.add_(lost)

    def keep(self, key: Hashable, corrected: torch.Tensor, sent: torch.Tensor) -> None:
        """Remember what ``sent`` lacks. An infinity or a NaN is not remembered: it would come again in every step."""
        if self.enabled:
            lost = torch.sub(corrected, sent, out=self._lost.get(key))
            self._lost[key] = lost.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def reset(self) -> None:
        self._lost.clear()
