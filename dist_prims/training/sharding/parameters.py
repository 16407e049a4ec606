"""ZeRO-3: parameters, gradients and the optimizer's state are sharded; a layer is whole only while it computes.

::

    forward   gather 1 | compute 1 | free 1, gather 2 | compute 2 | free 2
    backward  gather 2 | gradients 2 | free 2, reduce_scatter 2, gather 1 | gradients 1 | free 1, reduce_scatter 1

Autograd saves what the backward needs, including parameters, and would keep every layer whole until then. While a unit
computes, autograd therefore saves the place of a parameter instead of its tensor (``saved_tensors_hooks``). When the
backward unpacks the place, the unit is gathered again, and the previous one is freed. In any order of the backward, a
unit is whole when it is read, and at most one unit is whole besides those whose forward is running.

Ranks must gather and reduce in the same order, which must follow from the graph alone. Gradients are therefore reduced
when the next unit is gathered, and not when all have arrived: a rank whose batch skips a layer would wait. The ranks
agree on gradients that arrive later at the end of the backward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...collectives.call import group_of
from ...torch_compat import (
    graph_task_id,
    queue_backward_callback,
    saved_tensor_hooks,
    storage_id,
    tree_leaves,
    version_of,
)
from ..gradients.initial_sync import broadcast_coalesced, check_same_model
from ..gradients.ownership import averager_problem
from ..gradients.torch_averaging import averaging_problem
from .released_parameters import NO_COPY, make_present
from .unit import Unit
from .unit_assignment import by_kind, children, units_of

__all__: list[str] = []

_NO_BACKWARD = -1
_NONE, _DENSE, _FROZEN = range(3)


class ShardedParameters:
    """The parameters of ``model``, sharded in place by ``units``: modules that are each gathered as a whole.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    >>> sharded = ShardedParameters(model)
    >>> optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    >>> for batch in torch.ones(3, 4, 2):
    ...     model(batch).sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> {name: tuple(each.shape) for name, each in sharded.state_dict().items()}
    {'0.weight': (3, 2), '0.bias': (3,), '2.weight': (1, 3), '2.bias': (1,)}

    The default ``units`` are the model's children. A parameter in none of them or in several (tied weights) is whole
    during the model's forward. The optimizer gets :meth:`parameters`: a flat tensor for each unit and dtype, so it must
    be elementwise, as SGD and Adam are. The constructor copies rank 0's parameters to all ranks. All ranks must run the
    same units in the same order, and their losses must reach the same units; the computation within a unit may differ.
    Gradients are means over the ranks, added up until ``zero_grad()`` of the optimizer or of the model. A parameter
    without a gradient counts as zero if its unit has one. Freeze parameters, and copy the model, before sharding. With
    float16 call unscale of training.mixed_precision: torch's GradScaler checks only the shards of this rank.
    """

    collective_state_dict = True  # read by Checkpoints

    def __init__(
        self,
        model: torch.nn.Module,
        units: Iterable[torch.nn.Module] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = group_of(group, "ShardedParameters")
        self._model = model
        self.peak_bytes = 0  # of parameters that were whole at one time
        found = units_of(model, list(children(model) if units is None else units))
        names = {module: name for name, module in model.named_modules()} | {model: "the model"}
        settings = [f"unit {names[module]!r} of {len(parameters)} parameters" for module, parameters in found]
        tensors = (*model.named_parameters(), *model.named_buffers())
        rank = self._group.rank()
        problem = averaging_problem("ShardedParameters", model, rank) or averager_problem(
            "ShardedParameters", model, rank
        )
        check_same_model("ShardedParameters", settings, tensors, self._group, problem)
        broadcast_coalesced([each.detach() for each in (*model.parameters(), *model.buffers())], 0, self._group)
        self._whole: dict[int, Unit] = {}  # by the storage of what is gathered
        self._units: list[Unit] = []
        self._task = _NO_BACKWARD
        self._undo = ExitStack()
        for module, parameters in found:
            own = [Unit(names[module], model, each, self._group) for each in by_kind(parameters)]
            self._units += own
            self._wrap(module, own)
        for unit in self._units:
            for each in unit.parameters if unit.trained else []:
                hook: Any = each.register_post_accumulate_grad_hook(self._arrived)
                self._undo.callback(hook.remove)
        self._replace(model, "zero_grad", _Bound(model.zero_grad, self._zero_grad))
        refuse = functools.partial(_refuse_step, weakref.ref(self))
        self._undo.callback(register_optimizer_step_pre_hook(refuse).remove)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained shards of this rank, for its optimizer."""
        return [unit.shard for unit in self._there() if unit.trained]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which all parameters are whole and forwards gather nothing.

        Parameters can be read, or changed in place in the same way on all ranks.
        """
        units = self._there()
        with self._in_use(units):
            yield
            self._check_unchanged(units)
            for unit in units:
                unit.keep()

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their total 2-norm is at most ``max_norm``; return the norm before."""
        gradients = [each.grad for each in self.parameters() if each.grad is not None]
        squares = torch.zeros((), device=self._units[0].shard.device)
        for each in gradients:
            squares += each.float().square().sum()
        dist.all_reduce(squares, group=self._group)
        total = squares.sqrt()
        for each in gradients:
            each.mul_(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return total

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole model, gathered unit by unit; all ranks must call it. Buffers are this rank's."""
        whole = {}
        for unit in self._there():
            with self._in_use([unit]):
                whole.update({each: each.detach().clone() for each in unit.parameters})
        names = dict(self._model.named_parameters(remove_duplicate=False))
        plain = self._model.state_dict(keep_vars=True)  # without it, each parameter would be read
        return {
            name: whole[names[name]] if name in names else value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in plain.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's part of a whole state, of a plain model or of one sharded over any number of ranks."""
        units, mine = self._there(), self._model.state_dict(keep_vars=True)
        if missing := sorted(mine.keys() ^ state.keys()):
            raise ValueError(f"ShardedParameters: {missing[0]!r} is in the state or in the model, but not in both")
        for name, value in mine.items():
            if isinstance(value, torch.Tensor) and value.shape != state[name].shape:
                raise ValueError(
                    f"ShardedParameters: {name!r} has shape {tuple(state[name].shape)} in the state and "
                    f"{tuple(value.shape)} in the model; load the state of the same model"
                )
        names = {each: name for name, each in self._model.named_parameters()}
        for unit in units:
            unit.load([state[names[each]] for each in unit.parameters])
        for name, buffer in self._model.named_buffers():
            if name in state:
                buffer.copy_(state[name])

    def remove(self) -> None:
        """Make the model plain again, whole on every rank; this object is then unusable."""
        for unit in self._units:
            whole = [each.clone() for each in unit.pieces(unit.gather())]
            unit.free()
            for parameter, value in zip(unit.parameters, whole, strict=True):
                make_present(parameter)
                parameter.data = value
        self._units = []
        self._undo.close()

    def _refuse(self, optimizer: torch.optim.Optimizer) -> None:
        """RuntimeError for an optimizer of the model's own parameters: their gradients are with the shards."""
        sharded = {id(each): unit for unit in self._units for each in unit.parameters}
        for settings in optimizer.param_groups:
            for parameter in settings["params"]:
                if (unit := sharded.get(id(parameter))) is not None:
                    raise RuntimeError(
                        f"rank {self._group.rank()}: ShardedParameters: {type(optimizer).__name__} has parameters of "
                        f"the model ({unit.name}), which have neither values nor gradients between forwards, and would "
                        "train nothing; make it with sharded.parameters(), after sharding"
                    )

    def _there(self) -> list[Unit]:
        if not self._units:
            raise RuntimeError("ShardedParameters: remove() has made the model plain; shard it again")
        return self._units

    def _zero_grad(self, plain: Callable[..., None], set_to_none: bool = True) -> None:
        """``zero_grad()`` of the model: gradients are with the shards."""
        for shard in self.parameters():
            if set_to_none:
                shard.grad = None
            elif shard.grad is not None:
                shard.grad.zero_()
        plain(set_to_none)

    def _wrap(self, module: torch.nn.Module, units: list[Unit]) -> None:
        def forward(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self._in_use(units), self._places_saved():
                result = plain(*args, **kwargs)
            if module is not self._model and torch.is_grad_enabled() and graph_task_id() == _NO_BACKWARD:
                self._gather_before_backward(result, units)
            return result

        self._replace(module, "forward", _Bound(module.forward, forward))

    def _replace(self, module: torch.nn.Module, name: str, method: _Bound) -> None:
        before = module.__dict__.get(name)
        setattr(module, name, method)
        self._undo.callback(functools.partial(_restore, module, name, before))

    def _gather_before_backward(self, result: Any, units: list[Unit]) -> None:
        """Gather before the backward of ``result``, even if it reads no parameter on this rank: other ranks may."""
        if outputs := [each for each in tree_leaves(result) if isinstance(each, torch.Tensor) and each.grad_fn]:

            def gather(_: torch.Tensor) -> None:
                self._watch()
                for unit in units:
                    self._gather(unit)

            torch.autograd.graph.register_multi_grad_hook(outputs, gather, mode="any")

    @contextmanager
    def _in_use(self, units: list[Unit]) -> Iterator[None]:
        in_backward = graph_task_id() != _NO_BACKWARD  # a checkpoint that computes again
        if in_backward:
            self._watch()
        elif self._task != _NO_BACKWARD:
            self._forget()
        self._check_unchanged(units)
        for unit in units:
            unit.uses += 1
        try:
            for unit in units:
                self._gather(unit)
            yield
        finally:
            for unit in units:
                unit.uses -= 1
                if not in_backward and not unit.uses:
                    self._free(unit)

    @contextmanager
    def _places_saved(self) -> Iterator[None]:
        """Context in which autograd saves places instead of parameters.

        Other tensors go to outer hooks, such as those of an activation checkpoint.
        """
        outer = saved_tensor_hooks(while_tracing=True)

        def pack(tensor: torch.Tensor) -> Any:
            unit = self._whole.get(storage_id(tensor)) if tensor.layout == torch.strided else None
            if unit is None or unit.shard.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg():
                return outer[0](tensor) if outer else tensor
            return _Place(unit, version_of(unit.shard), tensor.shape, tensor.stride(), int(tensor.storage_offset()))

        def unpack(kept: Any) -> Any:
            if isinstance(kept, _Place):
                return self._at(kept)
            return outer[1](kept) if outer else kept

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _at(self, place: _Place) -> torch.Tensor:
        """The tensor at a place that the backward unpacks."""
        if place.version != version_of(place.unit.shard):
            raise RuntimeError(
                f"rank {self._group.rank()}: ShardedParameters: the parameters of {place.unit.name} were changed "
                "between forward and backward; step the optimizer after backward()"
            )
        self._watch()
        return self._gather(place.unit).as_strided(place.shape, place.stride, place.offset)

    def _gather(self, unit: Unit) -> torch.Tensor:
        """Make a unit whole, and free those that are not in use."""
        if unit.full is None:
            for other in [*self._whole.values()]:
                if not other.uses:
                    self._free(other)
                    if other.trained and self._task != _NO_BACKWARD:
                        other.reduce()
            self._whole[storage_id(unit.gather())] = unit
            self.peak_bytes = max(self.peak_bytes, sum(each.gather().nbytes for each in self._whole.values()))
        return unit.gather()

    def _free(self, unit: Unit) -> None:
        if unit.full is not None:
            del self._whole[storage_id(unit.full)]
            unit.free()

    def _watch(self) -> None:
        """Call ``_end`` when this backward ends."""
        if self._task != (task := graph_task_id()):
            self._task = task
            queue_backward_callback(self._end)

    def _arrived(self, parameter: torch.Tensor) -> None:
        self._watch()
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(
                f"rank {self._group.rank()}: ShardedParameters: a parameter of shape {tuple(parameter.shape)} has a "
                "sparse gradient; make its layer with sparse=False"
            )

    def _end(self) -> None:
        """End a backward: reduce the gradients that are left, on any rank."""
        self._task = _NO_BACKWARD
        for unit in [*self._whole.values()]:
            if not unit.uses:
                self._free(unit)
        if not (trained := [unit for unit in self._units if unit.trained]):
            return
        rank, size = self._group.rank(), self._group.size()
        table = torch.tensor([_kind(unit) * size + rank for unit in trained], device=trained[0].shard.device)
        dist.all_reduce(table, dist.ReduceOp.MAX, self._group)
        kinds = [divmod(code, size) for code in table.tolist()]
        for unit, (kind, other) in zip(trained, kinds, strict=True):
            if kind == _FROZEN:
                raise ValueError(
                    f"rank {rank}: ShardedParameters: a parameter of {unit.name} was frozen on rank {other} after it "
                    "was sharded; remove(), freeze it, and shard again"
                )
        for unit, (kind, _) in zip(trained, kinds, strict=True):
            if kind == _DENSE:
                unit.reduce()

    def _forget(self) -> None:
        """Discard what a backward that raised has left."""
        self._task = _NO_BACKWARD
        for unit in self._units:
            for parameter in unit.parameters:
                parameter.grad = None
            if not unit.uses:
                self._free(unit)

    def _check_unchanged(self, units: list[Unit]) -> None:
        for unit in units:
            if (found := unit.replaced()) is not None:
                raise ValueError(
                    f"rank {self._group.rank()}: ShardedParameters: a parameter of {unit.name} was replaced or "
                    f"changed in place ({found.dtype} on {found.device}) after it was sharded ({unit.shard.dtype} on "
                    f"{unit.shard.device}); change the model before, within gathered(), by our load_state_dict(), or "
                    "remove() and shard again"
                )


class _Place(NamedTuple):
    """The place of a saved tensor in a unit, and the version of the unit."""

    unit: Unit
    version: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Bound:
    """A replacement of a module's method. It refuses copies, which would use the parameters of this module."""

    def __init__(self, plain: Callable[..., Any], method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, plain)
        self._plain, self._method = plain, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(self._plain, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(NO_COPY)


def _refuse_step(of: weakref.ref[ShardedParameters], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if (sharded := of()) is not None:
        sharded._refuse(optimizer)


def _kind(unit: Unit) -> int:
    if not all(each.requires_grad for each in unit.parameters):
        return _FROZEN
    return _DENSE if unit.has_gradient() else _NONE


def _restore(module: torch.nn.Module, name: str, before: Any) -> None:
    delattr(module, name)
    if before is not None:
        setattr(module, name, before)
