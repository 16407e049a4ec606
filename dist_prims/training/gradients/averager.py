"""Gradient averaging that overlaps with the backward pass.

:func:`dist_prims.average_gradients` begins when backward has ended, and packs. Here a gradient is copied, as soon as it
is computed and still in the cache, to its place in a flat bucket; a full bucket is sent; and ``.grad`` is that place
from then on, so nothing is unpacked. Where ranks share memory a large bucket is summed while it fills, see
:mod:`..incremental_reduce`.

::

    backward    | layer 3 | layer 2 | layer 1 |        buckets are sent strictly in their order, which is the same
    buckets               | 0 ......| 1 ......| ..     on every rank; a gradient that is missing when backward ends
                                                ^ end  counts as zero

Why ``.grad`` may be None in between (``zero_grad()`` as it is by default): autograd then hands over the tensor that it
has just made, and one pass copies and divides it. A ``.grad`` that stays in place costs a pass that fills it with
zeros, one that adds and one that divides.

There is no ``finish()`` to call: a callback at the end of ``backward()`` sends what is left and waits for everything,
so that gradients are right wherever the next line of a program looks at them.

Where ranks use different parameters, they send a bucket at different moments of a backward. So an averager has a group
of its own, see :mod:`..group_duplicates`: its buckets meet neither the buckets of another averager nor the collectives
of a layer. And no rank waits for another before the end of its backward: the other rank may be waiting in such
a collective.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ...collectives.call import group_of
from ...torch_compat import graph_task_id, knows_group
from ..compression.compressor import Compressor, Exact
from ..group_duplicates import duplicate, end_groups, ranks_of
from ..mixed_precision import agree_on_overflow, unscale
from ..state_transfer import broadcast_coalesced
from .averaging import Averaging
from .backward_end import Ending, within_a_backward
from .clipping import clip
from .compressor_choice import compressor_of, describe, give_up, refuse_shared, restart, take
from .gradient_hook import hook_gradient
from .initial_sync import check_same_model
from .model_changes import ModelWatch
from .ownership import assign, predecessors, release
from .sparse import announced_sparse
from .torch_averaging import averaging_problem
from .uneven_batches import STEP, UNSCALE, Joining, ShadowSteps, join

__all__: list[str] = []

_NO_BACKWARD, _ONCE = -1, -2  # values of _task besides the number of a backward


class GradientAverager:
    """Averages the gradients of ``model`` over the ranks in every ``backward()``.

    >>> model = torch.nn.Linear(2, 1)
    >>> averager = GradientAverager(model)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for batch in torch.ones(3, 4, 2):
    ...     model(batch).sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    At the start all ranks take rank 0's parameters and buffers. ``bucket_mb``: the size of a message. ``overlap``:
    send during backward, not only at its end. ``compress``: a compressor of gradients, by name ("fp16",
    "bf16", "int8", "topk", "powersgd") or a :class:`Compressor`. ``group``: the ranks; the averager makes a group of
    its own of them, which it ends in :meth:`remove` or, where the parameters are on the CPU, when these are freed.

    Each ``backward()`` communicates. With several backward passes a step, wrap all but the last in :meth:`no_sync`, or
    all of them in :meth:`once`; without these the means are right as well, but sent several times. If only some
    ranks have a gradient for a parameter, the others add zeros; if no rank has one, ``.grad`` stays None. A backward
    that reaches a parameter of the model on one rank must reach one on every rank. A ``.grad`` is whole when
    ``backward()`` returns, not for a hook within it. The next backward overwrites a ``.grad`` that a program keeps:
    clone it. Parameters may be frozen and unfrozen between steps, on all ranks together. Parameters that the model gets
    later are not averaged; the first gradient of one gives a warning. Make a new averager then, after :meth:`remove`.

    Several averagers may take part in one backward. But a parameter has one averager: a new one of the same parameters
    over the same ranks takes the place of the old one, whose methods then raise; any other that has a parameter of the
    model must be removed first.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        bucket_mb: float = 25,
        overlap: bool = True,
        compress: str | Compressor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._given = group_of(group, "GradientAverager")  # the group of the program; _group is the averager's own
        self._rank, self._ranks = self._given.rank(), ranks_of(self._given)
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = [parameter for _, parameter in model.named_parameters()]
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._model, self._limit = model, int(bucket_mb * 2**20)
        self._overlap = self._sends_full = overlap  # _sends_full: send a full bucket at once, in this step
        self._check_arguments(model, bucket_mb, compress)
        self._begin_group()
        self._watch = ModelWatch(model, self._rank)
        self._only_adds = False  # in no_sync() and once(): gradients are not averaged
        self._joining: Joining | None = None
        self._lock = threading.RLock()  # each device has a thread of autograd
        hook = functools.partial(_arrived, weakref.ref(self))
        self._hooks = [hook_gradient(each, functools.partial(hook, n)) for n, each in enumerate(self._parameters)]
        take(self._compressor, self)
        assign(self._parameters, self)

    def _check_arguments(self, model: torch.nn.Module, bucket_mb: float, compress: str | Compressor | None) -> None:
        """Check the arguments (an error on one rank raises on all), and replace former averagers."""
        self._gone = ""  # why this averager is not in use, if it is not
        problem = averaging_problem("GradientAverager", model, self._rank)
        former: list[GradientAverager] = []
        self._compressor: Compressor = Exact()
        try:
            if bucket_mb <= 0:
                raise ValueError(f"GradientAverager: bucket_mb={bucket_mb} must be positive")
            former = predecessors(model, self._given)
            refuse_shared(compress, self._rank, former)
            self._compressor = compressor_of(compress)
        except ValueError as error:
            problem = error
        self._settings = f"bucket_mb={bucket_mb}, compress={describe(compress, self._compressor)}"
        self.name = self._compare(self._given, problem)
        for each in former:
            each.remove()
            each._gone = "a later one of the same parameters has replaced it"

    def _compare(self, group: dist.ProcessGroup, problem: Exception | None = None) -> str:
        """Compare model and settings with the other ranks; return a name for the averager's group."""
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        return check_same_model("GradientAverager", [self._settings], named, group, problem)

    def _begin_group(self) -> None:
        """Make the averager's own group, take rank 0's values, and begin without any gradient."""
        if agreed := getattr(self._compressor, "agreed", None):
            agreed()  # _compare() has compared its arguments
        self._group = duplicate(self._given, self.name)
        self._groups = [self._group]
        self._end_groups = functools.partial(end_groups, self._groups, self._given, os.getpid())
        self._finalizer = weakref.finalize(self, self._end_groups)
        self._finalizer.atexit = False
        if self._device.type != "cpu":  # with NCCL, ending its communicator is a collective
            self._finalizer.detach()
        self._synchronize(0)
        sparse = announced_sparse(self._model, self._parameters)
        self._averaging = Averaging(self._names, self._parameters, self._group, self._compressor, self._limit, sparse)
        self._task = _NO_BACKWARD  # or the backward whose gradients are averaged
        self._ending: weakref.ref[Ending] | None = None  # runs at the end of the backward; autograd keeps it until then

    def resize(self, group: dist.ProcessGroup | None = None) -> None:
        """Average over the ranks of another group, as after ``dist_prims.shrink`` or ``grow``; all of them call this.

        A new rank makes a GradientAverager instead, with the same arguments. As in the constructor, all ranks take the
        parameters and buffers of rank 0, the lowest of the ranks that were there before. All gradients are discarded,
        and so is what a compressor has kept: PowerSGD warms up again.
        """
        self._refuse_in_join("resize")
        given = group_of(group, "GradientAverager.resize")
        self.name = self._compare(given)
        self._finalizer.detach()
        self._end_groups()
        self._given, self._rank, self._ranks = given, given.rank(), ranks_of(given)
        self._watch.rank = self._rank
        for parameter in self._parameters:
            parameter.grad = None
        restart(self._compressor)
        self._begin_group()

    def synchronize(self, source: int = 0) -> None:
        """Copy the parameters and buffers of rank ``source`` of the group to every rank, as at the start. Running
        statistics (batch norm) are each rank's own until the next call."""
        self._refuse_in_join("synchronize")
        self._synchronize(source)

    def _synchronize(self, source: int) -> None:
        broadcast_coalesced([*self._model.parameters(), *self._model.buffers()], source, self._group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which ``backward()`` only adds to this rank's gradients; the next one outside averages the sum."""
        self._check_in_use()
        before, self._only_adds = self._only_adds, True
        try:
            yield
        finally:
            self._only_adds = before

    @contextmanager
    def once(self) -> Iterator[Callable[[Iterable[torch.Tensor]], None]]:
        """Context in which any number of ``backward()`` only add to this rank's gradients; its end averages the sums.
        The context gives a function ``complete(parameters)``: the gradients of these parameters are complete, and are
        sent while others are still computed. An error within leaves gradients as they are. Within :meth:`no_sync`, or
        another ``once()``, it does nothing.

        >>> model = torch.nn.Linear(2, 1)
        >>> with GradientAverager(model).once():
        ...     for _ in range(3):
        ...         model(torch.ones(1, 2)).sum().backward()
        >>> model.weight.grad
        tensor([[3., 3.]])
        """
        if self._only_adds:
            yield _nothing
            return
        self._check_in_use()
        self._begin(_ONCE)
        self._only_adds = True
        try:
            yield self._complete
        except BaseException:
            self._task = _NO_BACKWARD
            raise
        finally:
            self._only_adds = False
        self.end()

    @contextmanager
    def join(self, divide_by_initial_world_size: bool = True) -> Iterator[None]:
        """Context of a training loop whose ranks have uneven numbers of batches. A rank that is done takes part in the
        others' exchanges with zeros until all are done; then all take the parameters and buffers of a rank that has
        made the last step (the state of optimisers remains each rank's own). All ranks enter it together.

        Sums are divided by the number of ranks, as DistributedDataParallel does it, or by the number of ranks that
        are not done. Gradients are zeroed after every step. A step has one averaged backward, those before it being in
        :meth:`no_sync`, or one :meth:`once`: a second one would count the first one's mean as zero on ranks that are
        done, unless ``divide_by_initial_world_size`` is False. For several averagers of the same ranks use
        ``with a.join(), b.join()``: a rank that is done takes part in the steps of both. Buckets on a GPU, or of a
        group that torch did not make, are sent after backward only.
        """
        self._check_in_use()
        if self._joining:
            yield
            return
        part = ShadowSteps(self.name, divide_by_initial_world_size, self._take_part, self._synchronize)
        try:
            with join(part, self._given, self._make_channel) as self._joining:
                shares_queue = self._device.type != "cpu" or self._joining.channel is self._group
                self._sends_full = self._overlap and not shares_queue
                yield
        finally:
            self._joining, self._sends_full = None, self._overlap

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that the norm of all of them together is at most ``max_norm``; return what it was. Every
        rank has the same gradients, so nothing is sent."""
        return clip([each.grad for each in self._parameters if each.grad is not None], max_norm, norm_type)

    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.unscale_(optimizer)``, and all ranks find an inf where one does: all skip the step, or none."""
        self._check_in_use()
        if self._joining and scaler.is_enabled():
            self._joining.announce(UNSCALE)
        unscale(scaler, optimizer, self._group)

    def remove(self) -> None:
        """Detach from the model and the compressor, and end the averager's group. Every rank calls this, after the same
        step."""
        self._gone = self._gone or "remove() was called"
        give_up(self._compressor, self)
        for hook in self._hooks:
            if hook is not None:
                hook.remove()
        release(self._parameters, self)
        self._watch.end()
        self._end_groups()

    def is_like(self, parameters: Collection[int], group: dist.ProcessGroup) -> bool:
        """Whether this averager is for these parameters, by their id, and the ranks of this group."""
        same_ranks = group is self._given if self._ranks is None else ranks_of(group) == self._ranks
        return same_ranks and {*parameters} == {*self._numbers}

    def has_ended(self) -> bool:
        """Whether the group of the program was destroyed."""
        return self._ranks is not None and not knows_group(self._given)

    def end(self) -> None:
        """Finish the averaging; called at the end of a backward and of :meth:`once`, not by programs."""
        try:
            self._averaging.end(self._joining.announce(STEP) if self._joining else 1.0)
        finally:
            self._task, self._ending = _NO_BACKWARD, None

    def _take_part(self, kind: int, factor: float) -> None:
        """In :meth:`join`, when this rank is done: take part in a step of the others with zeros, and leave none."""
        if kind == UNSCALE:
            agree_on_overflow(0.0, self._group)
            return
        self._averaging.begin()
        self._averaging.end(factor, only_zeros=True)
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.grad = None

    def _check_in_use(self) -> None:
        if self._gone:
            raise RuntimeError(
                f"rank {self._rank}: GradientAverager: this averager is no longer in use: {self._gone}; use the "
                "one that was made last, or make a new one"
            )

    def _refuse_in_join(self, method: str) -> None:
        self._check_in_use()
        if self._joining is not None:  # the ranks that are done do not call it
            raise RuntimeError(
                f"rank {self._rank}: GradientAverager: {method}() is called within join(); leave it first"
            )

    def _make_channel(self) -> dist.ProcessGroup:
        """A group for the announcements of :meth:`join`."""
        if len(self._groups) == 1:
            self._groups.append(duplicate(self._given, f"{self.name}-join"))
        return self._groups[1]

    def _arrived(self, number: int, parameter: torch.Tensor) -> None:
        """The hook after autograd has added to ``parameter.grad``. Its code runs with a cold cache: keep it short."""
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise RuntimeError(
                f"rank {self._rank}: GradientAverager: backward(create_graph=True) asks for derivatives of a mean over "
                "ranks, which has no graph; use torch.autograd.grad(..., create_graph=True) for the inner derivative"
            )
        with self._lock:
            if self._only_adds:
                self._keep(number)
                return
            if graph_task_id() != self._task:
                self._begin_in_backward()
            if number in self._averaging.seen:
                raise RuntimeError(
                    f"rank {self._rank}: GradientAverager: parameter {self._names[number]!r} has got two gradients in "
                    "one backward(), by a backward within it; use checkpoint(..., use_reentrant=False), or "
                    "torch.autograd.grad in a Function of your own"
                )
            self._averaging.count(number, self._sends_full)

    def _keep(self, number: int) -> None:
        """Keep a gradient that is not averaged yet."""
        if self._task == _ONCE and number in self._averaging.seen:
            raise RuntimeError(
                f"rank {self._rank}: GradientAverager: parameter {self._names[number]!r} has got a gradient after "
                "complete() was called for it in once(); call complete() after the last backward that reaches it"
            )
        self._averaging.keep(number)

    def _complete(self, parameters: Iterable[torch.Tensor]) -> None:
        """In :meth:`once`: the gradients of these parameters are complete; parameters of other models are ignored."""
        with self._lock, torch.no_grad():
            for parameter in parameters:
                number = self._numbers.get(id(parameter))
                if number is not None and parameter.requires_grad and number not in self._averaging.seen:
                    self._averaging.count(number, self._sends_full)

    def _begin_in_backward(self) -> None:
        """Begin a step: the first gradient of a backward has arrived."""
        nested = within_a_backward()
        if nested and self._ending is not None and self._ending() is not None:
            return  # a backward within the averaged one, as in a checkpoint: its gradients belong to the step that runs
        self._averaging.sender.refuse_shown()
        if nested:
            raise RuntimeError(
                f"rank {self._rank}: GradientAverager: the first gradients come from a backward within backward(), "
                "that of a torch.autograd.Function, whose outer backward's end cannot be known; use checkpoint(..., "
                "use_reentrant=False), or torch.autograd.grad in a Function of your own"
            )
        self._begin(graph_task_id())
        ending = Ending.of_this_backward()
        ending.add(self)
        self._ending = weakref.ref(ending)

    def _begin(self, task: int) -> None:
        self._averaging.sender.refuse_shown()
        if self.has_ended():
            raise RuntimeError(
                f"rank {self._rank}: GradientAverager: its group has been destroyed, as dist_prims.shrink() and grow() "
                "do; call resize() on all ranks, or make a new averager"
            )
        self._averaging.begin()
        self._task, self._ending = task, None


def _arrived(averager: weakref.ref[GradientAverager], number: int, parameter: torch.Tensor) -> None:
    """The hook of a parameter, which does not keep the averager alive."""
    if (alive := averager()) is not None:
        alive._arrived(number, parameter)


def _nothing(*_: object) -> None:
    return None
