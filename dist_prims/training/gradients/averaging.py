"""Averaging of a model's gradients: they arrive one after the other, and at the end the ranks agree on the rest.

A parameter has a number: its place in ``parameters``. A gradient that a rank lacks counts as zero, unless no rank has
it; a sparse gradient is gathered. From the second step on the buckets follow the order in which gradients arrived on
rank 0. Gradients that some rank lacked come last: their buckets are full only at the end, and would delay all later
buckets. ``averager.py`` calls :meth:`Averaging.begin`, then ``count`` for each gradient, then ``end``.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from ..compression.compressor import Compressor, Exact
from .bucket_sender import BucketSender
from .gradient_presence import DENSE, FROZEN, NONE, SPARSE, Agreement, Presence, kind_of
from .sparse import sparse_mean

__all__: list[str] = []

_form = operator.attrgetter("shape", "dtype", "device")


class Averaging:
    """The gradients of ``parameters`` on their way to their means over the ranks of ``group``.

    Args:
        names, parameters: of the model; ``group``: for these gradients alone.
        compressor: averages the buckets; ``limit``: bytes of a bucket.
        sparse: the numbers of the parameters that are known to have sparse gradients.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        compressor: Compressor,
        limit: int,
        sparse: Collection[int] = (),
    ) -> None:
        self._names, self._parameters, self._group = names, parameters, group
        self._rank, self._size = group.rank(), group.size()
        self._share = 1 / self._size if type(compressor) is Exact else 1.0  # a compressor divides by itself
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self.reads_late = self._device.type != "cpu"  # see _settle()
        self._order = [*reversed(range(len(names)))]  # in which gradients come: at first a guess
        self._learns_order = True  # from the step that runs
        self._lacked: set[int] = set()  # the dense gradients that some rank did not get in some step
        self._sparse = {*sparse}
        self._forms = [*map(_form, parameters)]
        self._dense = {n for n, each in enumerate(parameters) if each.requires_grad and n not in self._sparse}
        self._kinds: list[int | None] = []  # what this rank's table was made from
        self._table = torch.empty(0)  # this rank's contribution to the agreement
        self._unread: Agreement | None = None
        self.sender = BucketSender(parameters, compressor, limit, group)
        self._make_buckets()
        self.reset()

    @property
    def seen(self) -> Collection[int]:
        """The gradients that have arrived, in their order."""
        return self._seen.keys()

    def begin(self) -> None:
        """Begin a step. Buckets are rebuilt here and not at the end of the step before: gradients have mostly been set
        to None since, so nothing is copied, and old memory is freed before new memory is allocated."""
        if [*map(_form, self._parameters)] != self._forms:
            for number in range(len(self._names)):
                self._check_unchanged(number)
        self._read()
        if self._rebuild:
            self._make_buckets()
        self.reset()

    def reset(self) -> None:
        """Discard the gradients that have arrived."""
        self._seen: dict[int, None] = {}
        self.sender.forget()

    def keep(self, number: int) -> None:
        """Move a gradient that is not complete to its place in a bucket: autograd adds the rest there."""
        self._check_unchanged(number)
        gradient = self._parameters[number].grad
        if self.sender.has_place(number) and gradient is not None and not gradient.is_sparse:
            self.sender.store(number, 1.0)

    def _check_unchanged(self, number: int) -> None:
        """A gradient of another shape would be written over its neighbours in the bucket."""
        if _form(self._parameters[number]) != self._forms[number]:
            raise ValueError(
                f"rank {self._rank}: GradientAverager: parameter {self._names[number]!r} has changed its shape, dtype "
                "or device; make a new GradientAverager on every rank after a change of the model"
            )

    def count(self, number: int, send: bool = True) -> None:
        """Count a complete gradient; ``send``: send the buckets that are full now."""
        self._seen[number] = None
        if self.sender.has_place(number) and self.sender.arrive(number, self._share) and send:
            self.sender.send_full()

    @torch.no_grad()
    def end(self, factor: float = 1.0, only_zeros: bool = False) -> None:
        """Send the remaining buckets, wait for all, and apply what the ranks agree on.

        Args:
            factor: the means are multiplied by it.
            only_zeros: this rank has no data left, and sends zeros.
        """
        try:
            self.sender.send_rest(self._seen, self._share, only_zeros)
            self.sender.wait()  # before the agreement: what a compressor still launches here differs by rank
            self._unread = agreement = self._agreement(only_zeros)
            agreement.arrive()
            if factor != 1:
                self.sender.scale(factor)
            self._settle(factor / self._size, only_zeros)
        finally:
            self.reset()

    def _agreement(self, only_zeros: bool) -> Agreement:
        kinds = [None if only_zeros else kind_of(parameter) for parameter in self._parameters]
        if kinds != self._kinds:
            self._kinds, self._table = kinds, Agreement.table(kinds, self._rank, self._device)
        return Agreement(self._table, self._group)

    def _settle(self, share: float, only_zeros: bool) -> None:
        """Apply the agreement. On a GPU a rank whose parameters all have the expected gradients reads the agreement
        only in its next step, to find errors, and does not wait for the GPU now."""
        expected = [DENSE if n in self._dense else FROZEN for n in range(len(self._names))]
        if self._kinds != expected or not self.reads_late:
            self._apply(self._read(), share, only_zeros)
        if self._learns_order:
            self._learn_order()

    def _read(self) -> Presence | None:
        """Read the last agreement, if it has not been read yet; raise on every rank if two ranks disagree."""
        agreement, self._unread = self._unread, None
        if agreement is None:
            return None
        presence = agreement.read()
        presence.check(self._names, self._rank)
        lacked = (presence.of_kind(NONE) & self._dense) - self._lacked
        self._lacked |= lacked
        self._rebuild |= bool(lacked)
        return presence

    def _apply(self, presence: Presence | None, share: float, only_zeros: bool) -> None:
        """Set each ``.grad`` as the ranks have agreed: to the mean in the bucket, also where this rank had no gradient.
        Gradients that have no place in a bucket are averaged now; ``share`` is the factor of their sum."""
        if presence is None:
            return
        dense, sparse = presence.of_kind(DENSE), presence.of_kind(SPARSE)
        for number in sorted(dense):
            if number in self._dense:
                self._parameters[number].grad = self.sender.place(number)
            else:  # unfrozen since the buckets were made
                self._average_alone(self._parameters[number], share, only_zeros)
        for number in sorted(sparse):
            parameter = self._parameters[number]
            if only_zeros:
                parameter.grad = None
            parameter.grad = sparse_mean(parameter, share, self._group)
        self._sparse = (self._sparse | sparse) - dense
        dense = presence.trainable() - self._sparse
        if dense != self._dense:
            self._dense, self._learns_order = dense, True

    def _average_alone(self, parameter: torch.Tensor, share: float, only_zeros: bool) -> None:
        """Average the gradient of a parameter that is in no bucket."""
        own = torch.zeros_like(parameter) if only_zeros or parameter.grad is None else parameter.grad
        parameter.grad = own.contiguous() * share
        dist.all_reduce(parameter.grad, group=self._group)

    def _learn_order(self) -> None:
        """Order the buckets from now on as gradients arrived on rank 0."""
        seen = [*self._seen]
        order = torch.tensor(seen + [n for n in self._order if n not in self._seen], device=self._device)
        dist.broadcast(order, group=self._group, group_src=0)
        self._order, self._learns_order, self._rebuild = order.tolist(), False, True

    def _make_buckets(self) -> None:
        order = [n for n in self._order if n in self._dense]
        self.sender.follow([n for n in order if n not in self._lacked], [n for n in order if n in self._lacked])
        self._rebuild = False
