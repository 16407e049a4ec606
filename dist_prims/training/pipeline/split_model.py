"""Cut a model into stages whose slowest, or largest, is as small as possible.

A pipeline is as fast as its slowest stage, so the cut is an optimisation problem: of all ways to cut a list of costs
into consecutive parts, find the one whose largest part is smallest. Dynamic programming finds it in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn

from ...agreement import broadcast_value, check_failures, failure_text
from .chain import Layers, Pop, Stage, Stash, layers
from .profile import profile
from .shared_tensors import refuse_trained, shared_tensors

__all__: list[str] = []


def split(
    model: nn.Module,
    stages: int,
    by: str | Sequence[int] = "time",
    sample: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> list[Stage]:
    """``stages`` modules that, one after the other, do what ``model`` does; its parameters are theirs, not copied.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    >>> first, second = split(model, 2, by="memory", sample=torch.ones(8, 64))
    >>> second.names, list(second.state_dict()), second._modules["2"] is model[2]
    (('1', '2'), ['2.weight', '2.bias'], True)

    ``by``: what to balance for micro-batches like ``sample``: ``"time"`` of forward and backward, or ``"memory"``
    of parameters, gradients and activations; or how many layers each stage gets. For the models that can be cut see
    ``dist_prims.training.pipeline.chain.layers``.

    Stages may share buffers and frozen parameters, such as a table of positions. A parameter that is trained, or a
    running statistic, must lie in one stage.

    Times differ from rank to rank. Where torch.distributed is in use, ``by="time"`` is a collective: rank 0 of
    ``group`` measures, while the others wait, and all ranks cut by its times.
    """
    chain = layers(model)
    _check_arguments(model, chain, stages, by, sample)
    if not isinstance(by, str):
        sizes = list(by)
    elif by == "memory":
        sizes = balance([cost.memory for cost in profile(model, sample, runs=1)], stages)
    else:
        sizes = _sizes_by_time(model, stages, sample, group)
    ends = list(accumulate(sizes))
    parts = [chain[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    refuse_trained("split", shared_tensors(parts, range(stages)), "cut with by=[sizes] so that one stage has both")
    borders = [(), *(_carried(chain, end) for end in ends)]
    return [
        Stage(part, number=number, count=stages, takes=borders[number], gives=borders[number + 1])
        for number, part in enumerate(parts)
    ]


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """How many consecutive ``costs`` go to each of the ``stages``, so that the largest sum is smallest; at least one.

    >>> balance([1, 2, 3, 4, 5, 6], stages=2)  # 10 and 11
    [4, 2]
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"balance: stages={stages} of {len(costs)} layers; each stage takes one layer or more")
    if any(not math.isfinite(cost) or cost < 0 for cost in costs):
        raise ValueError(f"balance: costs={list(costs)} must be finite numbers from 0")
    before = np.array([0, *accumulate(costs)], dtype=np.float64)
    count = len(costs)
    worst = before.copy()  # of the best cut of the first n layers into as many stages as were looked at
    last = [np.zeros(count + 1, dtype=np.int64)]  # and where its last stage begins
    for stage in range(2, stages + 1):
        following, begins = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)
        for end in range(stage, count + 1):
            choices = np.maximum(worst[stage - 1 : end], before[end] - before[stage - 1 : end])
            best = int(choices.argmin())
            following[end], begins[end] = choices[best], best + stage - 1
        worst = following
        last.append(begins)
    sizes: list[int] = []
    end = count
    for begins in reversed(last):
        begin = int(begins[end])
        sizes.insert(0, end - begin)
        end = begin
    return sizes


def _check_arguments(model: nn.Module, chain: Layers, stages: int, by: str | Sequence[int], sample: Any) -> None:
    """Check the arguments on every rank, before anything is measured or sent."""
    if not 1 <= stages <= len(chain):
        raise ValueError(
            f"split: stages={stages} of {len(chain)} layers; each stage takes one layer or more: choose fewer stages, "
            "or let the model's layers() name smaller parts"
        )
    if isinstance(by, str):
        if by not in ("time", "memory"):
            raise ValueError(
                f"split: by={by!r}; choose 'time', 'memory', or a list with the number of layers of each stage"
            )
        if sample is None:
            raise ValueError(f"split: by={by!r} measures the model; give it a micro-batch as sample=")
    elif len(by) != stages or sum(by) != len(chain) or min(by) < 1:
        raise ValueError(
            f"split: by={list(by)} must name, for each of {stages} stages, one layer or more, {len(chain)} together"
        )
    placed = {f"{name}.{key}" for name, layer in chain for key in layer.state_dict()}
    wanted = set(model.state_dict())
    if placed != wanted:
        raise ValueError(
            f"split: {sorted(placed ^ wanted)[:5]} of the model's state_dict are in none of its layers, or under "
            "another name there; layers() must name all that has parameters or buffers, as the model does"
        )


def _carried(chain: Layers, cut: int) -> tuple[str, ...]:
    """What is kept before the cut and popped behind it."""
    popped = {layer.name for _, layer in chain[cut:] if isinstance(layer, Pop)}
    return tuple(layer.name for _, layer in chain[:cut] if isinstance(layer, Stash) and layer.name in popped)


def _sizes_by_time(model: nn.Module, stages: int, sample: Any, group: dist.ProcessGroup | None) -> list[int]:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return _measured(model, stages, sample)
    sizes, failure = list[int](), None
    if dist.get_rank(group) == 0:
        try:
            sizes = _measured(model, stages, sample)
        except Exception as error:
            failure = error  # the other ranks wait for the sizes
    text, sizes = broadcast_value((failure_text(failure), sizes), 0, group)
    check_failures("split", failure, [text], group)
    return sizes


def _measured(model: nn.Module, stages: int, sample: Any) -> list[int]:
    return balance([cost.seconds for cost in profile(model, sample)], stages)
