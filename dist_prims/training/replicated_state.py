"""State that every rank has a copy of: it outlives a rank, and new ranks receive it.

A failure may reach the ranks at different points of a step. One rank has averaged its gradients and stepped, while
another has an error in the averaging of the same step. The rule by which they go on:

1. A step is done if one of the ranks that are left has done it. Otherwise all of them repeat it as a whole.
2. Ranks that have the state after the last step that is done keep it. The others take it from the lowest of these.

::

    step            6                7                  8
    rank 0   | compute, step | compute, step | compute, error  -> keeps its state after step 7, and repeats step 8
    rank 1   | compute, step | compute, died
    rank 2   | compute, step | compute, error                  -> takes the state of rank 0

Why rank 2 cannot go on by itself: the mean of step 7 needs the gradients of rank 1, which rank 0 has received and
rank 2 has not. Why no rank is two steps behind: a rank that has averaged the gradients of a step has received the
gradients of all ranks, so all ranks had computed that step.

The parameters change when an optimizer steps, and nothing between that and the end of the step communicates. So a copy
of them is not needed to repeat a step. What changes before (the position in the data, running statistics, random
states) is small, and is copied at the beginning of each step.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..agreement import gather_values
from ..collectives.call import group_of
from ..torch_compat import version_of
from . import randomness
from .data import ShardedIterable
from .gradients.initial_sync import check_same_model
from .state_transfer import transfer
from .stateful import load, state_of

__all__: list[str] = []

_OPERATION = "ReplicatedState.resize"


@dataclass
class _Snapshot:
    """What a step may change before its optimizers step, as it was at the beginning."""

    states: dict[str, Any]  # of all targets but modules and optimizers
    buffers: dict[str, torch.Tensor]
    hyperparameters: dict[str, list[dict[str, Any]]]  # of optimizers: the learning rate and others, by group
    random: dict[str, Any]
    version: int  # of the parameters: the number of changes in place


@dataclass(frozen=True)
class _Position:
    """How far a rank is: what it sends to the others."""

    step: int  # the number of steps that it has done
    is_changed: bool  # in the step after these, which it has not ended, its parameters have changed
    is_new: bool  # it has taken part in no resize() yet


class ReplicatedState:
    """The state of a training that each rank has a copy of, and the number of steps that are done.

    >>> import os, signal, dist_prims
    >>> def train():
    ...     model = torch.nn.Linear(2, 1, bias=False)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ...     state = ReplicatedState({"model": model, "optimizer": optimizer})
    ...     torch.nn.init.zeros_(model.weight)
    ...     while state.step < 4:
    ...         try:
    ...             if state.group is not dist.group.WORLD:  # at the beginning, and after shrink()
    ...                 state.resize()
    ...                 averager = dist_prims.GradientAverager(model)
    ...             with state.attempt():
    ...                 optimizer.zero_grad()
    ...                 model(torch.ones(1, 2)).sum().backward()
    ...                 if state.step == 2 and state.group.size() == 3 and dist.get_rank() == 0:
    ...                     os.kill(os.getpid(), signal.SIGKILL)
    ...                 optimizer.step()
    ...         except dist_prims.PeerDiedError:
    ...             dist_prims.shrink()
    ...     dist.barrier()
    ...     return dist.get_world_size(), model.weight.tolist()
    >>> dist_prims.spawn(train, 3, backend="dist_prims", timeout=60, min_ranks=2)
    [None, (2, [[-2.0, -2.0]]), (2, [[-2.0, -2.0]])]

    ``targets`` map names to modules, optimizers, schedulers, samplers, tensors and other objects with ``state_dict``
    and ``load_state_dict``, as for :class:`Checkpoints`. ``step`` is the number of steps that are done already.
    ``group`` is the group of the last :meth:`resize`, None before the first.
    """

    def __init__(self, targets: Mapping[str, Any], *, step: int = 0) -> None:
        for name, target in targets.items():
            if getattr(target, "collective_state_dict", False):
                raise ValueError(
                    f"ReplicatedState: {name!r} is a {type(target).__name__}, whose state is sharded: the shard of a "
                    "lost rank is lost; use Checkpoints for it"
                )
        self.group: dist.ProcessGroup | None = None
        self.step = step
        self._targets = dict(targets)
        self._modules = {name: target for name, target in targets.items() if isinstance(target, nn.Module)}
        self._optimizers = {name: each for name, each in targets.items() if isinstance(each, torch.optim.Optimizer)}
        self._streams = {name: target for name, target in targets.items() if isinstance(target, ShardedIterable)}
        self._begun: _Snapshot | None = None  # of the step that has begun and not ended
        self._has_stepped = False  # whether an optimizer has stepped since
        notice = functools.partial(_note_step, weakref.ref(self))
        for optimizer in self._optimizers.values():
            optimizer.register_step_pre_hook(notice)

    @contextmanager
    def attempt(self) -> Iterator[int]:
        """Context of one step: its end counts the step as done.

        All that the step changes is changed within: draw the batch here, and step the scheduler. No collective comes
        after ``optimizer.step()``. After an error call :meth:`resize`, then repeat the step.
        """
        if self._begun is not None:
            raise RuntimeError(
                f"ReplicatedState: step {self.step} has begun and not ended; after an error call resize() on all ranks "
                "before the step is repeated"
            )
        self._begun, self._has_stepped = self._snapshot(), False
        yield self.step
        self._begun, self.step = None, self.step + 1

    def resize(self, group: dist.ProcessGroup | None = None) -> None:
        """Bring the ranks of another group to one state, as after ``dist_prims.shrink`` or ``grow``.

        All ranks of the group call this, new ones with the same targets. Then ``step`` is the next step, on all ranks.
        Targets with a method ``resize``, as samplers have, share the rest of the data over the ranks of the group. An
        averager is resized after this call. Gradients are discarded. Random states are taken before the step that is
        repeated; new ranks get states derived from another rank's.

        RuntimeError, on all ranks, if no rank has a state without half a step.
        """
        # 1. Where is each rank, and which ranks have the state after the last step that is done?
        members = group_of(group, _OPERATION)
        modules = self._modules.values()
        tensors = [pair for each in modules for pair in (*each.named_parameters(), *each.named_buffers())]
        check_same_model("ReplicatedState", [f"targets={sorted(self._targets)}"], tensors, members)
        position = _Position(self.step, self._is_changed(), self.group is None)
        positions = gather_values((position.step, position.is_changed, position.is_new), members)
        step, current = _most_advanced([_Position(*each) for each in positions], members.rank())
        is_current = members.rank() in current
        is_repeated = self._begun is not None and self.step == step
        has_computed = self._begun is not None and self.step == step - 1
        # 2. Undo the step that is repeated, and take the state from the lowest rank that has it.
        in_streams = self._gather_positions(members, is_repeated, has_position=is_current or has_computed)
        if is_repeated:
            self._roll_back()
        random: dict[str, Any] = {}
        if len(current) < members.size():
            random = self._transfer(min(current), members, take=not is_current)
        # 3. The state is whole now, and no collective follows: if a rank dies, the next call finds these steps done.
        self.step, self._begun, self.group = step, None, members
        if random and not (is_repeated or has_computed):
            randomness.derive(random, members.rank())
        self._resize_targets(members, in_streams)
        for module in self._modules.values():
            module.zero_grad()

    def _snapshot(self) -> _Snapshot:
        return _Snapshot(
            states={name: copy.deepcopy(state_of(target)) for name, target in self._others().items()},
            buffers={name: buffer.clone() for name, buffer in self._buffers()},
            hyperparameters={
                name: [_hyperparameters(group) for group in optimizer.param_groups]
                for name, optimizer in self._optimizers.items()
            },
            random=randomness.capture(),
            version=self._version(),
        )

    def _roll_back(self) -> None:
        """Undo what the step has changed. A stream keeps its position, see :meth:`_resize_targets`."""
        begun = self._begun
        assert begun is not None
        for name, target in self._others().items():
            if name not in self._streams:
                load(name, target, begun.states[name])
        with torch.no_grad():
            for name, buffer in self._buffers():
                buffer.copy_(begun.buffers[name])
        for name, optimizer in self._optimizers.items():
            for group, values in zip(optimizer.param_groups, begun.hyperparameters[name], strict=True):
                group.update(copy.deepcopy(values))
        randomness.restore(begun.random)

    def _transfer(self, source: int, group: dist.ProcessGroup, take: bool) -> dict[str, Any]:
        """Send the state of rank ``source``, load it if ``take``, and return the random states of that rank.

        It is loaded when all of it has arrived: if a rank dies meanwhile, the state is still whole.
        """
        state: dict[str, Any] = {}
        if group.rank() == source:
            sent = {name: target for name, target in self._targets.items() if name not in self._streams}
            state = {"targets": {name: state_of(target) for name, target in sent.items()}}
            state["random"] = randomness.capture()
        received = transfer(state, source, group, take)
        if not take:
            return {}
        for name, each in received["targets"].items():
            load(name, self._targets[name], each)
        random: dict[str, Any] = received["random"]
        return random

    def _gather_positions(
        self, group: dist.ProcessGroup, is_repeated: bool, has_position: bool
    ) -> list[dict[str, dict[str, Any]]]:
        """The positions in the streams of all ranks with ``has_position``: each rank has its own position in a stream.

        A rank that repeats the step sends its positions from before the step. A rank that has computed the step, and
        takes the state after it from another rank, sends its present positions: they are behind the step already.
        """
        if not self._streams:
            return []
        begun = self._begun.states if is_repeated and self._begun else {}
        own = {name: begun.get(name) or stream.state_dict() for name, stream in self._streams.items()}
        return [each for each in gather_values(own if has_position else None, group) if each]

    def _resize_targets(self, group: dist.ProcessGroup, positions: list[dict[str, dict[str, Any]]]) -> None:
        """Share the data over the ranks."""
        for name, stream in self._streams.items():
            stream.resize(group, states=[each[name] for each in positions])
        for name, target in self._others().items():
            if name not in self._streams and not isinstance(target, torch.Tensor) and hasattr(target, "resize"):
                target.resize(group)

    def _others(self) -> dict[str, Any]:
        """The targets whose states are small: neither modules nor optimizers."""
        large = {*self._modules, *self._optimizers}
        return {name: target for name, target in self._targets.items() if name not in large}

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, module in self._modules.items():
            yield from module.named_buffers(prefix)

    def _version(self) -> int:
        return sum(version_of(parameter) for module in self._modules.values() for parameter in module.parameters())

    def _is_changed(self) -> bool:
        return self._begun is not None and (self._has_stepped or self._version() != self._begun.version)


def _most_advanced(positions: Sequence[_Position], rank: int) -> tuple[int, list[int]]:
    """The number of steps that are done, and the ranks that have the state after them. New ranks do not count, unless
    all are new.

    >>> _most_advanced([_Position(7, True, False), _Position(8, False, False), _Position(0, False, True)], rank=0)
    (8, [1])
    """
    all_new = all(position.is_new for position in positions)
    whole = {
        number: position.step
        for number, position in enumerate(positions)
        if not position.is_changed and (all_new or not position.is_new)
    }
    if not whole:
        raise RuntimeError(
            f"rank {rank}: {_OPERATION}: on all ranks the parameters have changed in a step that then failed; restore "
            "a checkpoint, and let no collective follow optimizer.step() within attempt()"
        )
    step = max(whole.values())
    return step, [number for number, each in whole.items() if each == step]


def _note_step(state: weakref.ref[ReplicatedState], *_: object) -> None:
    """Called when an optimizer is about to step."""
    if (alive := state()) is not None:
        alive._has_stepped = True


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a parameter group of an optimizer: the learning rate and others."""
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
