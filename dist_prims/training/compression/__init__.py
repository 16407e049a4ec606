"""Gradient compression: compressors of buckets, which average the gradients over the ranks in fewer bytes.

A compressor is given to ``GradientAverager(compress=...)``, as an object or by its name. Properties of all of them:

- every rank ends with the same bits: what differs between ranks is decoded from the same bytes by each of them;
- what a step loses is added to the gradient of the next one (error feedback, ``feedback``), so that nothing is lost
  for good, except when buckets are rebuilt: after the first step, which shows the order of gradients, and after
  parameters are frozen or unfrozen; ``feedback=False`` leaves it out, and its memory, which is as large as the
  gradients;
- a compressor has the state of one averager: each averager has its own;
- a gradient that is not finite on one rank is not finite on any rank afterwards, so that a ``GradScaler`` sees it.
  What was lost is kept in the scale of the gradients: after a scaler halves its scale, it counts twice for one step;
- on a group of one rank nothing is sent and nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .half import Half
from .int8 import Int8
from .power_sgd import PowerSGD
from .stages import Staged
from .top_k import TopK

__all__ = ["Half", "Int8", "PowerSGD", "TopK"]

_MAKERS: dict[str, Callable[[], Staged]] = {
    "fp16": partial(Half, torch.float16),
    "bf16": partial(Half, torch.bfloat16),
    "int8": Int8,
    "topk": TopK,
    "powersgd": PowerSGD,
}


def make(name: str) -> Staged:
    """A compressor with its defaults, by name: "fp16", "bf16", "int8", "topk" or "powersgd".

    >>> make("fp16")
    Half(dtype=torch.float16, feedback=True)
    """
    if name not in _MAKERS:
        raise ValueError(f"compress={name!r}: there are {', '.join(map(repr, _MAKERS))}, and objects of your own")
    return _MAKERS[name]()
