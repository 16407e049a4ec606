"""Models of one shape, run and trained together: stacked and vectorised on each rank, sharded over the ranks.

A loop over models launches a small kernel for each layer of each model. If the weights of a layer are stacked into one
tensor, ``torch.func.vmap`` launches one kernel for all models. Each rank has some of the members, and weights are never
sent: only outputs, or, for a mean or a vote, sums of the size of one member's output. Training sends nothing.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.func import functional_call, stack_module_state, vmap

from ..torch_compat import default_group
from ..training.gradients.initial_sync import broadcast_coalesced
from .ensemble_spec import MemberSpec, agree_on_members, own_random_numbers
from .row_shards import Kind, agree, gather, share

__all__ = ["DistributedEnsemble"]

Models = Sequence[torch.nn.Module] | Callable[[int], torch.nn.Module]


class DistributedEnsemble:
    """The members of an ensemble, some on each rank of the group.

    >>> ensemble = DistributedEnsemble([torch.nn.Linear(3, 2) for _ in range(5)])
    >>> x = torch.ones(4, 3)
    >>> ensemble.outputs(x).shape, ensemble.mean(x).shape, ensemble.vote(x).shape
    (torch.Size([5, 4, 2]), torch.Size([4, 2]), torch.Size([4]))
    >>> optimizer = torch.optim.SGD(ensemble.parameters(), lr=0.1)
    >>> losses = ensemble.backward(torch.nn.functional.mse_loss, x, torch.zeros(4, 2))  # of this rank's members
    >>> optimizer.step()
    >>> ensemble.gather(losses).shape
    torch.Size([5])
    >>> sorted(ensemble.member(4))
    ['bias', 'weight']

    ``models`` is a list of all members, the same on every rank, which copies its share. With ``count``, ``models`` is a
    function from a number to a member, called on the rank of that member only. Members are the same in all but the
    values of their parameters and buffers, and there may be fewer of them than ranks. ``inputs`` is a tensor or a tuple
    of tensors, the same batch for every member. With ``each=True`` it has a batch for every member, in order, or for
    every member of this rank (``mine``).

    Methods that return results of all members are collective: every rank calls them, in the same order. Calling the
    ensemble itself, :meth:`backward`, :meth:`parameters` and :meth:`load_member` are not. Random numbers (dropout) are
    different for each member.
    """

    def __init__(self, models: Models, count: int | None = None, group: dist.ProcessGroup | None = None) -> None:
        self._group: dist.ProcessGroup = group or default_group()
        self.count, self.mine = 0, range(0)
        spec: MemberSpec | None = None
        failure: Exception | None = None
        try:
            self.count, self.mine, members = self._made(models, count)
            if members:
                spec = MemberSpec.of(members, self.mine)
                self._template: torch.nn.Module | None = _without_memory(members[0])
                self._parameters, self._buffers = stack_module_state(members)
        except Exception as error:  # sent to the other ranks before it is raised
            failure = error
        self._spec = agree_on_members(self.count, spec, failure, self._group)
        if spec is None:
            self._template = None
            device = torch.empty(0, device=self._spec.device).device
            self._parameters, self._buffers = self._spec.stacks_of_none(device)
        self._device = next(each.device for each in self._tensors())

    def __call__(self, inputs: Any, *, each: bool = False) -> torch.Tensor:
        """The outputs of this rank's members, (members, ...), which can be differentiated; empty on a rank without."""
        rows = self._rows(inputs, each)
        return self._nothing() if rows is None else rows

    def outputs(self, inputs: Any, *, each: bool = False, root: int | None = None) -> torch.Tensor | None:
        """All members' outputs in order, (count, ...): on every rank, or on ``root`` alone and None elsewhere."""
        what = "outputs" if root is None else f"outputs to {root}"
        rows, kind = self._agreed(what, inputs, each)
        return gather(rows, kind, self.count, self._group, self._device, root)

    def mean(self, inputs: Any, *, each: bool = False) -> torch.Tensor:
        """The members' mean output, on every rank."""
        rows, kind = self._agreed("mean", inputs, each)
        return self._mean(rows, kind).to(kind.dtype)

    def moments(self, inputs: Any, *, each: bool = False, correction: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean and the variance of the members' outputs, on every rank.

        The variance is a sum of squared distances from the mean, so no digits cancel where members agree.
        ``correction`` is that of ``torch.var``.
        """
        rows, kind = self._agreed(f"moments with correction={correction}", inputs, each)
        mean = self._mean(rows, kind)
        squares = torch.zeros(kind.shape, dtype=mean.dtype.to_real(), device=self._device)
        if rows is not None:
            squares += (rows.to(mean.dtype) - mean).abs().square().sum(0)
        dist.all_reduce(squares, group=self._group)
        return mean.to(kind.dtype), (squares / max(self.count - correction, 0)).to(kind.dtype.to_real())

    def variance(self, inputs: Any, *, each: bool = False, correction: int = 1) -> torch.Tensor:
        """The disagreement of the members: the variance of their outputs, on every rank."""
        return self.moments(inputs, each=each, correction=correction)[1]

    def votes(self, inputs: Any, *, each: bool = False, dim: int = -1) -> torch.Tensor:
        """The number of members whose output is largest at each index along ``dim``, on every rank."""
        rows, kind = self._agreed(f"votes along {dim}", inputs, each)
        if not -len(kind.shape) <= dim < len(kind.shape):
            raise ValueError(
                f"DistributedEnsemble.votes on rank {self._group.rank()}: dim={dim} is not a dimension of outputs of "
                f"shape {kind.shape}"
            )
        counts = torch.zeros(kind.shape, dtype=torch.int64, device=self._device)
        if rows is not None:
            dim = dim % len(kind.shape) + 1
            largest = rows.argmax(dim, keepdim=True)
            counts += torch.zeros_like(rows, dtype=torch.int64).scatter_(dim, largest, 1).sum(0)
        dist.all_reduce(counts, group=self._group)
        return counts

    def vote(self, inputs: Any, *, each: bool = False, dim: int = -1) -> torch.Tensor:
        """The index along ``dim`` with the most votes, on every rank; the lowest one if several are equal."""
        return self.votes(inputs, each=each, dim=dim).argmax(dim)

    def gather(self, rows: torch.Tensor, root: int | None = None) -> torch.Tensor | None:
        """The rows of all members in order, such as losses, from each rank's rows of its members."""
        failure = None
        is_tensor = isinstance(rows, torch.Tensor)
        if not is_tensor or rows.dim() == 0 or len(rows) != len(self.mine):
            given = f"{len(rows)} rows" if is_tensor and rows.dim() > 0 else _described(rows)
            failure = ValueError(
                f"DistributedEnsemble.gather on rank {self._group.rank()}: {given} for {len(self.mine)} members; "
                "give a tensor with a row for each"
            )
        mine = None if failure or not self.mine else rows.to(self._device)
        kind = agree(f"gather to {root}", mine, failure, self._group, self._device)
        return gather(mine, kind, self.count, self._group, self._device, root)

    def backward(
        self, loss: Callable[[torch.Tensor, Any], torch.Tensor], inputs: Any, targets: Any, *, each: bool = False
    ) -> torch.Tensor:
        """Add the gradient of each member's loss to ``.grad``; return the losses of this rank's members.

        No message is sent. The method differentiates the sum of the losses; each loss depends on the parameters of its
        own member only.
        """
        losses = self._rows(inputs, each, loss, targets)
        if losses is None:
            return self._nothing()
        losses.sum().backward()
        return losses.detach()

    def parameters(self) -> Iterator[torch.Tensor]:
        """The stacked parameters of this rank's members, for an optimizer; their length is 0 on a rank without members.

        An element-wise optimizer, such as SGD or Adam, trains each member as if it were alone. One that uses the norm
        of a parameter, such as Adafactor, would use the norm over many members.
        """
        yield from self._parameters.values()

    def train(self, mode: bool = True) -> DistributedEnsemble:
        if self._template is not None:
            self._template.train(mode)
        return self

    def eval(self) -> DistributedEnsemble:
        return self.train(False)

    @torch.no_grad()
    def member(self, number: int) -> dict[str, torch.Tensor]:
        """The state of one member, on every rank, for ``load_state_dict`` of a plain model."""
        place, failure = None, None
        try:
            place = self._place("member", number)
        except (TypeError, ValueError) as error:
            failure = error
        agree(f"member {number}", torch.empty(1), failure, self._group, self._device)
        owner = next(
            rank for rank in range(self._group.size()) if number in share(self.count, self._group.size(), rank)
        )
        mine = {
            name: each.new_empty(each.shape[1:]) if place is None else each[place].detach().clone()
            for name, each in (*self._parameters.items(), *self._buffers.items())
        }
        broadcast_coalesced(mine.values(), owner, self._group)
        return {key: mine[name] for key, name in self._spec.keys.items()}

    @torch.no_grad()
    def load_member(self, number: int, state: dict[str, torch.Tensor]) -> None:
        """Load the state of a plain model into a member, on the member's rank; other ranks do nothing."""
        if (place := self._place("load_member", number)) is None:
            return
        stacks = {**self._parameters, **self._buffers}
        for key, name in self._spec.keys.items():
            if key not in state or state[key].shape != stacks[name].shape[1:]:
                found = list(state[key].shape) if key in state else "missing"
                raise ValueError(
                    f"DistributedEnsemble.load_member({number}) on rank {self._group.rank()}: {key!r} is {found} in "
                    f"the state and {list(stacks[name].shape[1:])} in the members; give the state of the same model"
                )
        for key, name in self._spec.keys.items():
            stacks[name][place] = state[key]

    def _place(self, call: str, number: int) -> int | None:
        if not 0 <= operator.index(number) < self.count:
            raise ValueError(f"DistributedEnsemble.{call}: member {number}; there are {self.count}, numbered from 0")
        return number - self.mine.start if number in self.mine else None

    def _made(self, models: Models, count: int | None) -> tuple[int, range, list[torch.nn.Module]]:
        """The number of members, the numbers of this rank's, and these members."""
        rank, size = self._group.rank(), self._group.size()
        if (count is None) != isinstance(models, Sequence | torch.nn.ModuleList):
            raise ValueError(
                f"DistributedEnsemble on rank {rank}: count={count} with a {type(models).__name__}; "
                "give a list of models, or count and a function from a number to a model"
            )
        number_of: int = count if count is not None else len(models)  # type: ignore[arg-type]
        if number_of < 1:
            raise ValueError(f"DistributedEnsemble: {number_of} members; at least 1 is needed")
        mine = share(number_of, size, rank)
        members = [models[number] if count is None else models(number) for number in mine]  # type: ignore
        for number, member in zip(mine, members, strict=True):
            if not isinstance(member, torch.nn.Module):
                raise TypeError(
                    f"DistributedEnsemble on rank {rank}: member {number} is {_described(member)}, not a Module"
                )
        return number_of, mine, members

    def _nothing(self) -> torch.Tensor:
        return torch.empty(0, dtype=self._spec.dtype, device=self._device)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._parameters.values()
        yield from self._buffers.values()

    def _mean(self, rows: torch.Tensor | None, kind: Kind) -> torch.Tensor:
        if not (kind.dtype.is_floating_point or kind.dtype.is_complex):
            raise ValueError(
                f"DistributedEnsemble on rank {self._group.rank()}: outputs are {kind.dtype} and have no mean; "
                "use outputs() or vote()"
            )
        wide = torch.promote_types(kind.dtype, torch.float32)
        total = torch.zeros(kind.shape, dtype=wide, device=self._device) if rows is None else rows.sum(0, dtype=wide)
        dist.all_reduce(total, group=self._group)
        return total / self.count

    @torch.no_grad()
    def _agreed(self, what: str, inputs: Any, each: bool) -> tuple[torch.Tensor | None, Kind]:
        """This rank's rows, and the kind of a row, on which all ranks agree."""
        rows, failure = None, None
        try:
            rows = self._rows(inputs, each)
        except Exception as error:
            failure = error
        return rows, agree(f"{what}, {self.count} members", rows, failure, self._group, self._device)

    def _rows(
        self, inputs: Any, each: bool, loss: Callable[..., torch.Tensor] | None = None, targets: Any = None
    ) -> torch.Tensor | None:
        """The outputs of this rank's members, or their losses; None where it has none."""
        with own_random_numbers(self._group.rank(), self._device):  # on every rank, so that the generators stay equal
            return None if self._template is None else self._run(self._template, inputs, each, loss, targets)

    def _run(
        self,
        template: torch.nn.Module,
        inputs: Any,
        each: bool,
        loss: Callable[..., torch.Tensor] | None,
        targets: Any,
    ) -> torch.Tensor:
        batch = inputs if isinstance(inputs, tuple) else (inputs,)
        given = [*batch] if loss is None else [*batch, targets]
        if each:
            given = [self._of_members(tensor) for tensor in given]

        def one(parameters: Any, buffers: Any, *given: Any) -> torch.Tensor:
            output = functional_call(template, (parameters, buffers), given[: len(batch)])
            if loss is not None:
                output = loss(output, given[-1])
            if not isinstance(output, torch.Tensor) or (loss is not None and output.dim() > 0):
                what = "one number" if loss is not None else "a tensor"
                raise ValueError(f"DistributedEnsemble: each member must give {what}; it gives {_described(output)}")
            return output

        in_dims = (0, 0, *[0 if each else None for _ in given])
        rows: torch.Tensor = vmap(one, in_dims, randomness="different")(self._parameters, self._buffers, *given)
        return rows

    def _of_members(self, tensor: torch.Tensor) -> torch.Tensor:
        """A batch for each of this rank's members."""
        if len(tensor) == self.count:
            return tensor[self.mine.start : self.mine.stop]
        if len(tensor) == len(self.mine):
            return tensor
        raise ValueError(
            f"DistributedEnsemble on rank {self._group.rank()}: each=True with {len(tensor)} batches; give one for "
            f"each of all {self.count} members, or for each of this rank's {len(self.mine)}"
        )


def _described(output: Any) -> str:
    return f"shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"


def _without_memory(model: torch.nn.Module) -> torch.nn.Module:
    """A copy whose tensors are on the meta device. ``.to("meta")`` would separate tied weights."""
    memo: dict[int, Any] = {id(each): each.detach().to("meta") for each in model.buffers()}
    for each in model.parameters():
        memo[id(each)] = torch.nn.Parameter(each.detach().to("meta"), each.requires_grad)
    return copy.deepcopy(model, memo)
