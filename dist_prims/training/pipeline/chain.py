"""A model as a chain of named layers, with values that skip layers, which can be cut into stages.

A skip connection crosses a cut. An ``nn.Sequential`` cannot express it, and a forward written in Python cannot be cut.
Here ``Stash("a")`` keeps the value that passes, ``Pop("a")`` joins it to a later value, and a stage takes
and returns, beside the value between the layers, exactly what a later stage still pops.

>>> net = Chain(nn.Linear(2, 2), Stash("in"), nn.Linear(2, 2), nn.ReLU(), Pop("in", torch.add), nn.Linear(2, 1))
>>> first = Stage(layers(net)[:3], number=0, count=2, gives=["in"])
>>> second = Stage(layers(net)[3:], number=1, count=2, takes=["in"])
>>> x = torch.ones(5, 2)
>>> torch.equal(second(*first(x)), net(x)), list(second.state_dict())
(True, ['5.weight', '5.bias'])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...torch_compat import children_of, has_call_hooks

__all__: list[str] = []

Layers = Sequence[tuple[str, nn.Module]]


class Stash(nn.Module):
    """Keep the input under ``name``, until the last :class:`Pop` of it.

    >>> Chain(Stash("x"), nn.Tanh(), Pop("x"))(torch.zeros(2))
    tensor([0., 0.])
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(
            f"Stash({self.name!r}) works in a Chain or a stage of split(); make the nn.Sequential a Chain"
        )


class Pop(nn.Module):
    """Go on with ``combine(x, kept)``, where ``kept`` is what ``Stash(name)`` kept. ``combine`` may be a module.

    >>> Chain(Stash("x"), nn.Tanh(), Pop("x", lambda x, kept: torch.cat([x, kept])))(torch.zeros(2))
    tensor([0., 0., 0., 0.])
    """

    def __init__(self, name: str, combine: Callable[[Any, torch.Tensor], Any] = torch.add) -> None:
        super().__init__()
        self.name = name
        self.combine = combine

    def forward(self, x: Any, *kept: torch.Tensor) -> Any:
        if not kept:
            raise RuntimeError(
                f"Pop({self.name!r}) works in a Chain or a stage of split(); make the nn.Sequential a Chain"
            )
        return self.combine(x, *kept)


class Chain(nn.Sequential):
    """An ``nn.Sequential`` in which :class:`Stash` and :class:`Pop` work, also within Sequentials inside it.

    >>> Chain(Stash("x"), nn.Sequential(nn.Tanh(), Pop("x")))(torch.zeros(2))
    tensor([0., 0.])
    """

    def forward(self, x: Any) -> Any:
        kept: dict[str, torch.Tensor] = {}
        for _, layer in layers(self):
            x = call(layer, x, kept)
        return x


class Stage(nn.Module):
    """Some layers of a model, under their names there and with its own parameters, not copies.

    It is called with a tensor, several, or a tuple of them; the last ones are the values that it ``takes``, which
    earlier stages have kept. It returns one tensor, or a tuple whose last ones are those that it ``gives`` to the next.

    >>> stage = Stage(layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU())))
    >>> stage(torch.ones(1, 2)).shape, list(stage.state_dict())
    (torch.Size([1, 3]), ['0.weight', '0.bias'])
    """

    def __init__(
        self, chain: Layers, *, number: int = 0, count: int = 1, takes: Sequence[str] = (), gives: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.number, self.count = number, count
        self.takes, self.gives = tuple(takes), tuple(gives)
        self.names = tuple(name for name, _ in chain)
        self.training = any(layer.training for _, layer in chain)
        for name, layer in chain:
            self._place(name.split("."), layer)
        first = next((layer for _, layer in chain if not isinstance(layer, _PASSING)), None)
        # If so, forward() clones the input: a leaf of autograd, or a buffer of another stage that is used again.
        self._begins_in_place = number > 0 and bool(getattr(first, "inplace", False))

    def extra_repr(self) -> str:
        return f"{self.number} of {self.count}, takes={self.takes}, gives={self.gives}"

    def forward(self, *values: Any) -> Any:
        if len(values) == 1 and isinstance(values[0], tuple):
            values = values[0]
        inputs = len(values) - len(self.takes)
        if inputs < 1:
            raise TypeError(
                f"{self._described()} takes a value and the kept {list(self.takes)}; it got {len(values)} values"
            )
        x = values[0] if inputs == 1 else values[:inputs]
        if self._begins_in_place and isinstance(x, torch.Tensor):
            x = x.clone()
        kept = dict(zip(self.takes, values[inputs:], strict=True))
        for name in self.names:
            x = call(self._layer(name), x, kept)
        return x if self.number == self.count - 1 else self._handed_over(x, kept)

    def _handed_over(self, x: Any, kept: dict[str, torch.Tensor]) -> Any:
        outputs = x if isinstance(x, tuple) and len(x) > 1 else (x,)
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                raise TypeError(
                    f"{self._described()} ends with a {type(output).__name__}; between stages pass a tensor or a tuple "
                    "of several: cut elsewhere, or let the layer return tensors"
                )
        outputs = (*outputs, *(kept[name] for name in self.gives))
        return outputs if len(outputs) > 1 else outputs[0]

    def _described(self) -> str:
        names = f"{self.names[0]} to {self.names[-1]}" if self.names else "no layers"
        return f"stage {self.number} of {self.count} ({names})"

    def _place(self, path: Sequence[str], layer: nn.Module) -> None:
        """Register a layer without ``add_module``, which refuses names of this class's attributes."""
        branch: nn.Module = self
        for part in path[:-1]:
            found = children_of(branch).setdefault(part, _Branch())
            if not isinstance(found, _Branch):
                raise ValueError(f"Stage: layer {'.'.join(path)!r} lies within another layer, {part!r}")
            branch = found
        if path[-1] in children_of(branch):
            raise ValueError(f"Stage: two layers are named {'.'.join(path)!r}, or one lies within the other")
        children_of(branch)[path[-1]] = layer

    def _layer(self, name: str) -> nn.Module:
        """Look up a layer in each forward: a program may have replaced it (quantisation, a wrapper)."""
        found: Any = self
        for part in name.split("."):
            found = children_of(found)[part]
        return found  # type: ignore[no-any-return]


class _Branch(nn.Module):
    """An inner node of the names of layers."""


_PASSING = (Stash, nn.Identity, nn.Flatten, nn.Unflatten)  # their output is their input, or a view of it


def call(layer: nn.Module, x: Any, kept: dict[str, torch.Tensor]) -> Any:
    """One layer of a chain, whose kept values are ``kept``."""
    if isinstance(layer, Pop):
        return layer(x, kept[layer.name])
    if not isinstance(layer, Stash):
        return layer(x)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"Stash({layer.name!r}) keeps a tensor; here passes a {type(x).__name__}")
    kept[layer.name] = x
    return x


def layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of what ``model`` calls one after the other, as fine as it can be cut.

    >>> [name for name, _ in layers(nn.Sequential(nn.Sequential(nn.ReLU(), nn.Tanh()), nn.ReLU()))]
    ['0.0', '0.1', '1']

    These are the model's own ``layers()``, or the parts of an ``nn.Sequential``, and so on within each of them.
    """
    found = _parts(model)
    if found is None:
        raise TypeError(
            f"layers: a {type(model).__name__} does not define the order of its layers; make it an nn.Sequential or "
            "a Chain, or give it a method layers() that returns (name, module) pairs"
        )
    checked = [pair for name, part in found for pair in _fine(name, part)]
    _check_skips(checked)
    return checked


def _parts(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    own = getattr(model, "layers", None)
    if callable(own) and not isinstance(own, nn.Module):
        return list(own())
    if isinstance(model, nn.Sequential) and type(model).forward in (nn.Sequential.forward, Chain.forward):
        return [(name, part) for name, part in children_of(model).items() if part is not None]
    return None


def _fine(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    parts = None if has_call_hooks(module) else _parts(module)  # hooks want the module to be called as one
    if parts is None:
        yield name, module
    else:
        for inner, part in parts:
            yield from _fine(f"{name}.{inner}", part)


def _check_skips(chain: Layers) -> None:
    """Every name is stashed once and popped later, or the error would come in the middle of a step."""
    stashed, popped = set(), set()
    for index, (where, layer) in enumerate(chain):
        if isinstance(layer, Stash):
            if layer.name in stashed:
                raise ValueError(f"layers: {where} stashes {layer.name!r} a second time; give it a name of its own")
            after = next((each for _, each in chain[index + 1 :] if not isinstance(each, _PASSING)), None)
            if getattr(after, "inplace", False):
                raise ValueError(f"layers: what {where} stashes as {layer.name!r} is overwritten by {after}")
            stashed.add(layer.name)
        elif isinstance(layer, Pop):
            if layer.name not in stashed:
                raise ValueError(f"layers: {where} pops {layer.name!r}, which no layer before it stashes")
            popped.add(layer.name)
    if stashed - popped:
        raise ValueError(f"layers: {sorted(stashed - popped)} are stashed and never popped; remove their Stash")
