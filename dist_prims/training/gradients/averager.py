"""Gradients averaged while the backward pass still runs.

:func:`dist_prims.average_gradients` begins when backward has ended, and packs. Here a gradient is copied, as soon as it
is there and still in the cache, to its place in a flat bucket; a bucket that is full is sent; and ``.grad`` is that
place from then on, so that nothing is unpacked. Where ranks share memory a large bucket is summed while it fills, see
:mod:`.gradual`.

::

    backward    | layer 3 | layer 2 | layer 1 |        buckets are sent strictly in their order, which is the same
    buckets               | 0 ......| 1 ......| ..     on every rank; what is missing in one when backward ends
                                                ^ end  counts as zero

Why ``.grad`` may be None in between (``zero_grad()`` as it is by default): autograd then hands over the tensor that it
has just made, and one pass copies and divides it. A ``.grad`` that stays in place costs a pass that fills it with
zeros, one that adds and one that divides.

There is no ``finish()`` to call: a callback at the end of ``backward()`` sends what is left and waits for everything,
so that gradients are right wherever the next line of a program looks at them.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from ...collectives.call import group_of
from .agreement import DENSE, FROZEN, SPARSE, Agreement, Verdict, kind_of
from .bucket import Compressor, Exact
from .join import Joining
from .nested import within_a_backward
from .overflow import unscale
from .sending import Sending
from .sparse import announced_sparse, sparse_mean
from .start import compare, spread

__all__ = ["GradientAverager"]

_NO_BACKWARD = -1
_OWNERS: weakref.WeakValueDictionary[int, GradientAverager] = weakref.WeakValueDictionary()  # by id of a compressor


class GradientAverager:
    """Every ``backward()`` of ``model`` ends with the mean of the gradients over the ranks.

    >>> model = torch.nn.Linear(2, 1)
    >>> averager = GradientAverager(model)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for batch in torch.ones(3, 4, 2):
    ...     model(batch).sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    At the start all ranks take rank 0's parameters and buffers. ``bucket_mb``: how much travels together. ``overlap``:
    send during backward, not only at its end. ``compress``: what travels in place of the gradients, by name ("fp16",
    "bf16", "int8", "topk", "powersgd") or a :class:`Compressor`.

    A ``.grad`` is averaged as a whole. So two losses whose backwards follow each other are averaged right, and sent
    twice; all but the last of them in :meth:`no_sync` are sent once. A parameter without gradient on some ranks counts
    as zero there; without one on any, it keeps none. A ``.grad`` is whole when ``backward()`` returns, and not for a
    hook within it; one that a program keeps is overwritten by the next backward: clone it. Parameters may be frozen and
    unfrozen between steps, on all ranks alike; parameters that the model is given later are not seen: make a new
    averager then, after :meth:`remove`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        bucket_mb: float = 25,
        overlap: bool = True,
        compress: str | Compressor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if bucket_mb <= 0:
            raise ValueError(f"GradientAverager: bucket_mb={bucket_mb} must be positive")
        self._group = group_of(group, "GradientAverager")
        self._rank, self._size = self._group.rank(), self._group.size()
        _refuse_shared(compress, self._rank)
        compare(model, f"bucket_mb={bucket_mb}, compress={_name_of(compress)}", self._group)
        self._model, self._overlap, self._exact = model, overlap, compress is None
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = [parameter for _, parameter in model.named_parameters()]
        self._device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._reads_late = self._device.type != "cpu"
        self.synchronize()

        self._order = [*reversed(range(len(self._names)))]  # in which gradients come: at first a guess
        self._learning = True
        self._sparse = announced_sparse(model, self._parameters)
        self._compressor = _compressor_of(compress)
        self._sending = Sending(self._parameters, self._compressor, int(bucket_mb * 2**20), self._group)
        self._dense = {n for n, each in enumerate(self._parameters) if each.requires_grad and n not in self._sparse}
        self._follow()
        self._kinds: list[int | None] = []  # what this rank's table was made from
        self._table = torch.empty(0)
        self._unread: Agreement | None = None
        self._local = False
        self._joining: Joining | None = None
        self._outer: weakref.ref[Callable[[], None]] | None = None  # what autograd holds until backward ends or raises
        self._lock = threading.RLock()  # each device has a thread of autograd
        self._begin_anew()
        self._hooks = [_hook(each, functools.partial(self._arrived, n)) for n, each in enumerate(self._parameters)]
        _OWNERS[id(self._compressor)] = self

    @torch.no_grad()
    def synchronize(self, source: int = 0) -> None:
        """Give every rank the parameters and buffers of one, by its number in the group. So it is done at the start;
        running statistics (batch norm) are each rank's own until it is done again."""
        spread([*self._model.parameters(), *self._model.buffers()], source, self._group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, ``backward()`` only adds to this rank's gradients; the next one outside averages all of it."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    @contextmanager
    def join(self, divide_by_initial_world_size: bool = True) -> Iterator[None]:
        """For ranks with uneven numbers of batches: have the loop within. A rank that is done takes part in the others'
        exchanges with zeros until all are done; then all take the parameters and buffers of one that has made the last
        step (what optimisers remember remains each rank's own).

        Sums are divided by the number of ranks, as DistributedDataParallel does it, or by that of the ranks which are
        not done. Gradients are zeroed after every step. A step has one averaged backward, those before it being in
        :meth:`no_sync`: a second one would count the first one's mean as zero on ranks that are done, unless
        ``divide_by_initial_world_size`` is False.
        """
        self._joining = joining = Joining(self._group, self._device, divide_by_initial_world_size)
        try:
            yield
            while joining.roll(present=False):
                self._open()
                self._end(shadow=True)
                self._zero()
        finally:
            self._joining = None
        if joining.last is not None:
            self.synchronize(joining.last)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that the norm of all of them together is at most ``max_norm``; return what it was. Every
        rank has the same gradients, so nothing is sent."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        values = [each if each.layout == torch.strided else each.coalesce().values() for each in gradients]
        total = torch.nn.utils.get_total_norm(values, norm_type)
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for each in values:
            each.mul_(scale.to(each.device))
        return total

    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.unscale_(optimizer)``, and all ranks find an inf where one does: all skip the step, or none."""
        unscale(scaler, optimizer, self._group)

    def remove(self) -> None:
        """Leave the model alone from now on, and the compressor to another averager."""
        if _OWNERS.get(id(self._compressor)) is self:
            del _OWNERS[id(self._compressor)]
        for hook in self._hooks:
            if hook is not None:
                hook.remove()

    def _zero(self) -> None:
        """After a step in which this rank was a shadow; where it has made the step itself, the program does this."""
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.grad = None

    def _arrived(self, number: int, parameter: torch.Tensor) -> None:
        """Autograd has added to ``parameter.grad``. The cache is full of other things, so what is done here is slow."""
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise RuntimeError(
                f"rank {self._rank}: GradientAverager: backward(create_graph=True) asks for derivatives of a mean over "
                "ranks, which has no graph; use torch.autograd.grad(..., create_graph=True) for the inner derivative"
            )
        with self._lock:
            if self._local:
                if self._sending.has_place(number) and parameter.grad is not None and not parameter.grad.is_sparse:
                    self._sending.store(number, 1.0)
                return
            if torch._C._current_graph_task_id() != self._task:
                self._begin()
            if number in self._seen:
                raise RuntimeError(
                    f"rank {self._rank}: GradientAverager: parameter {self._names[number]!r} has got two gradients in "
                    "one backward(), by a backward within it; use checkpoint(..., use_reentrant=False), or "
                    "torch.autograd.grad in a Function of your own"
                )
            self._seen[number] = None
            if self._sending.has_place(number) and self._sending.arrive(number, self._share) and self._overlap:
                self._sending.send_full()

    def _begin(self) -> None:
        """The first gradient of a backward has come."""
        nested = within_a_backward()
        if nested and self._outer is not None and self._outer() is not None:
            return  # a backward within ours
        if self._sending.is_shown:
            raise RuntimeError(
                f"rank {self._rank}: GradientAverager: the last backward() has raised when other ranks had seen some "
                f"of it ({self._sending.sent} of {len(self._sending.layout.buckets)} buckets were sent), and they wait "
                "for the rest; end this process, so that they do not wait in vain"
            )
        if nested:
            raise RuntimeError(
                f"rank {self._rank}: GradientAverager: the first gradients come from a backward within backward(), "
                "that of a torch.autograd.Function, which does not tell where the outer one ends; use checkpoint(..., "
                "use_reentrant=False), or torch.autograd.grad in a Function of your own"
            )
        self._read()
        if self._joining:
            self._joining.roll(present=True)
        self._open()
        self._task = torch._C._current_graph_task_id()
        end = functools.partial(self._end)
        self._outer = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _open(self) -> None:
        """Buckets are rebuilt here, not when that was found out: gradients have mostly been set to None since, so that
        nothing is copied and old memory goes before the new comes."""
        if self._rebuild:
            self._follow()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._task = _NO_BACKWARD
        self._outer = None
        self._seen: dict[int, None] = {}  # in the order in which they came
        self._sending.forget()
        self._mean_share = self._joining.share if self._joining else 1 / self._size
        self._share = self._mean_share if self._exact else 1.0

    @torch.no_grad()
    def _end(self, shadow: bool = False) -> None:
        """Send what is left, wait for all, and do what the ranks agree on."""
        try:
            self._sending.send_rest(self._seen, self._share, shadow)
            self._unread = agreement = self._agreement(shadow)
            self._sending.wait()
            agreement.arrive()
            if not self._exact and self._mean_share * self._size != 1:
                self._sending.scale(self._mean_share * self._size)
            self._settle(shadow)
        finally:
            self._begin_anew()

    def _agreement(self, shadow: bool) -> Agreement:
        kinds = [None if shadow else kind_of(parameter) for parameter in self._parameters]
        if kinds != self._kinds:
            self._kinds, self._table = kinds, Agreement.table(kinds, self._rank, self._device)
        return Agreement(self._table, self._group)

    def _settle(self, shadow: bool) -> None:
        """A rank whose parameters have all got what is expected has nothing to ask the others. On a GPU it reads only
        in its next step what they said, to find out about errors, and does not wait for the GPU now."""
        expected = [DENSE if n in self._dense else FROZEN for n in range(len(self._names))]
        if self._kinds != expected or not self._reads_late:
            self._take(self._read(), shadow)
        if self._learning:
            self._learn()

    def _read(self) -> Verdict | None:
        """What the ranks have said last, if that is not known yet."""
        agreement, self._unread = self._unread, None
        if agreement is None:
            return None
        verdict = agreement.read()
        verdict.check(self._names, self._rank)
        return verdict

    def _take(self, verdict: Verdict | None, shadow: bool) -> None:
        if verdict is None:
            return
        dense, sparse = verdict.who(DENSE), verdict.who(SPARSE)
        for number in sorted(dense):
            if number in self._dense:
                self._parameters[number].grad = self._sending.place(number)
            else:  # unfrozen since the buckets were made
                self._average_alone(self._parameters[number], shadow)
        for number in sorted(sparse):
            parameter = self._parameters[number]
            if shadow:
                parameter.grad = None
            parameter.grad = sparse_mean(parameter, self._mean_share, self._group)
        self._sparse = (self._sparse | sparse) - dense
        wanted = verdict.trainable() - self._sparse
        if wanted != self._dense:
            self._dense, self._learning = wanted, True

    def _average_alone(self, parameter: torch.Tensor, shadow: bool) -> None:
        own = torch.zeros_like(parameter) if shadow or parameter.grad is None else parameter.grad
        parameter.grad = own.contiguous() * self._mean_share
        dist.all_reduce(parameter.grad, group=self._group)

    def _learn(self) -> None:
        """From now on buckets follow the order in which rank 0 has got its gradients."""
        seen = [*self._seen]
        order = torch.tensor(seen + [n for n in self._order if n not in self._seen], device=self._device)
        dist.broadcast(order, group=self._group, group_src=0)
        self._order, self._learning, self._rebuild = order.tolist(), False, True

    def _follow(self) -> None:
        self._sending.follow([n for n in self._order if n in self._dense])
        self._rebuild = False


def _hook(parameter: torch.Tensor, call: Callable[[torch.Tensor], None]) -> RemovableHandle | None:
    """On a frozen parameter too: if it is unfrozen later, the hook is there."""
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return None
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
    if frozen:
        parameter.requires_grad_(False)
    return handle


def _compressor_of(compress: str | Compressor | None) -> Compressor:
    if compress is None:
        return Exact()
    if isinstance(compress, str):
        from ..compression import make  # many programs need none

        return make(compress)
    return compress


def _refuse_shared(compress: str | Compressor | None, rank: int) -> None:
    """What it has lost of one model's gradients would be added to another's, in silence where buckets are as large."""
    if id(compress) in _OWNERS:
        raise ValueError(
            f"rank {rank}: GradientAverager: another averager uses this {_name_of(compress)}; give each averager its "
            "own compressor, or remove() the other one"
        )


def _name_of(compress: str | Compressor | None) -> str:
    return compress if isinstance(compress, str) else type(compress).__name__
