"""ZeRO-3 (Rajbhandari et al., ZeRO, 2020): parameters, gradients and states are sharded; one layer is whole at a time.

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ...collectives.call import group_of
from ...torch_compat import graph_task_id, queue_backward_callback, saved_tensor_hooks, storage_id, tree_leaves
from ..gradients.initial_sync import check_same_model
from ..gradients.ownership import averager_problem
from ..gradients.torch_averaging import averaging_problem
from ..state_transfer import broadcast_coalesced
from .unit import Unit, assign_units

__all__: list[str] = []

_NO_BACKWARD = -1  # graph_task_id() outside of a backward
_not_compiled = functools.partial(torch.compiler.disable, reason="ShardedParameters gathers a unit here")


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
    same units in the same order, and their losses must reach the same units; the computation within a unit may differ,
    but every rank must read the same parameters outside of units. Gradients are means over the ranks, added up until
    ``zero_grad()`` of the optimizer. A parameter without a gradient counts as zero if its unit has one. Freeze
    parameters, and copy the model, before sharding. ``torch.compile(model)`` compiles each unit by itself. With float16
    call unscale of training.mixed_precision: torch's GradScaler checks only the shards of this rank.
    """

    collective_state_dict = True  # read by Checkpoints

    def __init__(
        self, model: Module, units: Iterable[Module] | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        self._group, self._model = group_of(group, "ShardedParameters"), model
        assigned = assign_units(model, units)
        settings = [f"unit {name!r} of {len(parameters)} parameters" for (name, *_), parameters in assigned.items()]
        tensors = (*model.named_parameters(), *model.named_buffers())
        problem = averaging_problem("ShardedParameters", model, self._group.rank())
        problem = problem or averager_problem("ShardedParameters", model, self._group.rank())
        check_same_model("ShardedParameters", settings, tensors, self._group, problem)
        broadcast_coalesced([each.detach() for _, each in tensors], 0, self._group)
        self._whole: dict[int, Unit] = {}  # the units that are whole, by their storage
        self._units = [Unit(key[0], model, parameters, self._group) for key, parameters in assigned.items()]
        self._task = _NO_BACKWARD  # or the backward whose end calls _end_backward()
        for unit in self._units:
            module = model.get_submodule(unit.name)
            module.forward = _GatheringForward(self, module.forward, unit)
            # Some gradients arrive in a backward that gathers nothing: of a bias in none of the units, for example.
            for parameter in unit.parameters if unit.shard.requires_grad else []:
                parameter.register_post_accumulate_grad_hook(lambda _: self._note_backward())

    def parameters(self) -> list[Parameter]:
        """The trained shards of this rank, for its optimizer."""
        return [unit.shard for unit in self._units if unit.shard.requires_grad]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which all parameters are whole, and can be read, or changed in the same way on all ranks."""
        with ExitStack() as stack:
            for unit in self._units:
                stack.enter_context(self._in_use(unit))
            yield
            for unit in self._units:
                unit.keep_changes()

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their total 2-norm is at most ``max_norm``; return the norm before."""
        gradients = [each.grad for each in self.parameters() if each.grad is not None]
        squares = get_total_norm(gradients).float().square().to(self._units[0].shard.device)
        dist.all_reduce(squares, group=self._group)
        clip_grads_with_norm_(self.parameters(), max_norm, squares.sqrt())
        return squares.sqrt()

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole model; all ranks must call it. Buffers are this rank's."""
        with self.gathered():
            return self._model.state_dict()  # its tensors keep the whole alive

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a whole state, of a plain model or of one sharded over any number of ranks; all ranks must call it."""
        with self.gathered():
            self._model.load_state_dict(state)

    def _gather_before_backward(self, result: Any, unit: Unit) -> None:
        """Gather before the backward of ``result``, even if it reads no parameter on this rank: other ranks may.

        Not for the model itself (its name is empty): the backward of its last unit follows at once, and would free it.
        """
        outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor) and each.grad_fn]
        if outputs and unit.name and torch.is_grad_enabled():
            torch.autograd.graph.register_multi_grad_hook(outputs, lambda _: self._gather(unit), mode="any")  # type: ignore[arg-type]

    @contextmanager
    def _in_use(self, unit: Unit) -> Iterator[None]:
        self._gather(unit)
        unit.uses += 1
        try:
            yield
        finally:
            unit.uses -= 1
            if graph_task_id() == _NO_BACKWARD:  # else a checkpoint has computed the unit again for its backward
                self._free_unused()

    @contextmanager
    def _computing(self, unit: Unit) -> Iterator[None]:
        """Context in which autograd saves places of parameters; the rest goes to outer hooks, as of a checkpoint."""
        outer = saved_tensor_hooks(while_tracing=True)

        def pack(tensor: torch.Tensor) -> Any:
            owner = self._whole.get(storage_id(tensor)) if tensor.layout == torch.strided else None
            # as_strided() of what is gathered gives no other dtype, and no conjugate or negation that is still to come.
            if owner is None or owner.shard.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg():
                return outer[0](tensor) if outer else tensor
            view = tensor.shape, tensor.stride(), int(tensor.storage_offset())
            return _Place(self._tensor_at, owner, owner.version(), view)

        def unpack(saved: Any) -> Any:
            if isinstance(saved, _Place):
                return saved()
            return outer[1](saved) if outer else saved

        # An operation outside of a graph calls pack() while the compiler is on, which would compile pack().
        with self._in_use(unit), torch.autograd.graph.saved_tensors_hooks(_not_compiled(pack), unpack):
            yield

    def _tensor_at(self, unit: Unit, version: int, view: Any) -> torch.Tensor:
        """The tensor at a place that the backward unpacks. ``version``: of the shard in the forward; ``view``: shape,
        strides and offset in the gathered unit."""
        if version != unit.version():
            raise RuntimeError(f"{unit.where}: the shard was changed between forward and backward; step after both")
        return self._gather(unit).as_strided(*view)

    def _gather(self, unit: Unit) -> torch.Tensor:
        """Make a unit whole, and free the units that are not in use; in a backward also reduce their gradients."""
        self._note_backward()
        if unit.full is None:
            for other in self._free_unused():
                if other.shard.requires_grad and self._task != _NO_BACKWARD:
                    other.reduce()
            self._whole[storage_id(unit.gather())] = unit
        return unit.gather()

    def _free_unused(self) -> list[Unit]:
        """Free the units that no forward uses, and return them."""
        unused = {storage: unit for storage, unit in self._whole.items() if not unit.uses}
        for storage in unused:
            self._whole.pop(storage).free()
        return [*unused.values()]

    def _note_backward(self) -> None:
        """Called in each gather and when a gradient arrives: have autograd call ``_end_backward`` at the end of a new
        backward."""
        if self._task != (task := graph_task_id()):
            self._task = task
            if task != _NO_BACKWARD:
                queue_backward_callback(self._end_backward)
            else:  # a backward has raised, for its end would have set _task: discard what it has left
                self._free_unused()
                for unit in self._units:
                    unit.discard_gradients()

    def _end_backward(self) -> None:
        """Reduce the gradients that have arrived since their unit was reduced, on any rank."""
        self._task = _NO_BACKWARD
        self._free_unused()
        mine = [any(each is not None for each in unit.gradients()) for unit in self._units]
        has_gradient = torch.tensor(mine, dtype=torch.int32, device=self._units[0].shard.device)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX, self._group)
        for unit, is_left in zip(self._units, has_gradient.tolist(), strict=True):
            if is_left:
                unit.reduce()


class _Place(functools.partial[torch.Tensor]):
    """What autograd saves instead of a parameter: a call that gathers the unit and returns the tensor."""


class _GatheringForward:
    """The forward of a module that gathers a unit. The compiler sees the module's own forward only.

    The compiler must not compile ``__call__``, nor any function that gathers or frees (``_call_uncompiled``), but the
    module's own forward. ``_call`` is the frame in which it begins: it begins in none of torch's own modules.
    """

    def __init__(self, sharded: ShardedParameters, plain: Callable[..., Any], unit: Unit) -> None:
        functools.update_wrapper(self, plain)
        self._sharded, self._plain, self._unit = sharded, plain, unit

    @functools.partial(_not_compiled, recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = self._sharded._computing(self._unit)
        _call_uncompiled(context.__enter__)
        try:
            result = _call(self._plain, *args, **kwargs)
        finally:
            _call_uncompiled(context.__exit__, None, None, None)
        _call_uncompiled(self._sharded._gather_before_backward, result, self._unit)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:  # a copy would compute with the parameters of this module
        raise RuntimeError("ShardedParameters: a sharded model cannot be copied; load state_dict() into a new model")


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_call_uncompiled = _not_compiled(_call)
