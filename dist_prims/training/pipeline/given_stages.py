"""The stages that a program gives to a pipeline: the stages of a rank, and what the ranks compare."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch

from ...schedules.pipelines import PipelinePlan
from .loss_weights import Objective
from .shared_tensors import SharedTensor, shared_tensors

__all__: list[str] = []

Stages = Sequence[torch.nn.Module] | Mapping[int, torch.nn.Module]  # all in order, or a rank's own by number


def count_stages(stages: Stages, ranks: int) -> int:
    """The stages of all ranks; where a rank is given only its own ones, all have as many."""
    return len(stages) * ranks if isinstance(stages, Mapping) else len(stages)


def own_stages(stages: Stages, plan: PipelinePlan, rank: int) -> dict[int, torch.nn.Module]:
    """The stages of a rank, by number."""
    numbers = [stage for stage in range(plan.stages) if plan.rank_of[stage] == rank]
    if isinstance(stages, Mapping) and sorted(stages) != numbers:
        raise ValueError(f"pipeline: rank {rank} is given stages {sorted(stages)}; by {plan.name} it has {numbers}")
    for number, module in stages.items() if isinstance(stages, Mapping) else enumerate(stages):
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"pipeline: stage {number} is a {type(module).__name__}; it must be a torch.nn.Module")
    return {number: stages[number] for number in numbers}


def device_of(own: Mapping[int, torch.nn.Module]) -> torch.device:
    """The device of the first parameter or buffer of a rank's stages; the CPU if they have none."""
    tensors = (each for module in own.values() for each in (*module.parameters(), *module.buffers()))
    return next((each.device for each in tensors), torch.device("cpu"))


def describe(plan: PipelinePlan, objective: Objective, stages: Stages, device: torch.device) -> str:
    """What all ranks must have in common."""
    order = zlib.crc32(repr((plan.rank_of, plan.actions)).encode())
    cut = "" if isinstance(stages, Mapping) else f", cut {_cut(stages):08x}"
    return (
        f"{plan.name} (stages={plan.stages}, num_microbatches={plan.num_microbatches}, order {order:08x}, "
        f"reduction={objective.reduction}, metrics={list(objective.metrics)}, "
        f"scaler={objective.scaler is not None}, device={device.type}{cut})"
    )


def _cut(stages: Sequence[torch.nn.Module]) -> int:
    """A checksum of where a model was cut."""
    shapes = [[(name, tuple(each.shape)) for name, each in stage.named_parameters()] for stage in stages]
    return zlib.crc32(
        repr([(getattr(each, "names", None), of) for each, of in zip(stages, shapes, strict=True)]).encode()
    )


def shared_stages(stages: Stages, loss: torch.nn.Module | None, plan: PipelinePlan) -> list[SharedTensor]:
    """What stages of different ranks share, and the loss, which is on the rank of the last stage."""
    if isinstance(stages, Mapping):
        return []
    parts: list[list[tuple[str, torch.nn.Module]]] = [[("", stage)] for stage in stages]
    if loss is not None:
        parts[-1].append(("loss", loss))
    return shared_tensors(parts, plan.rank_of)
