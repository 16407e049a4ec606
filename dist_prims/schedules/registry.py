"""The registry of algorithms. One generator function with the decorator :func:`algorithm` adds an algorithm.

Proof, price, picture, tests, benchmark and documentation iterate over the registered algorithms.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .closed_form_load import load_of
from .contract import COLLECTIVES, ROOTED, contract
from .cost_card import Card, default_ranks_a_host
from .load import Hosts, Load, count
from .steps import Phases, ScheduleData, Step, Steps, most_steps

__all__: list[str] = []

Count = int | Callable[..., int] | None
Make = Callable[..., Iterator[Step] | Phases]
_Make = TypeVar("_Make", bound=Make)
_MOST_RANKS_COUNTED = 512  # of an algorithm that a user has registered


@dataclass(frozen=True, eq=False)
class Algorithm:
    """A registered algorithm; :func:`algorithm` explains the fields that it sets.

    ``parameters``: names and defaults, apart from size and root.

    ``trusted``: the algorithm runs without a proof; see :mod:`.trust`. ``built_in``: it is one of this package. An
    algorithm that is registered again is a new object, so that caches of the previous one do not apply to it.
    """

    collective: str
    name: str
    make: Make
    chunks: Count
    scratch: Count
    replicas: str
    card: Card | None
    parameters: Mapping[str, Any]
    trusted: bool
    built_in: bool
    variants: Sequence[Mapping[str, Any]] = ()
    part: Callable[..., Iterator[Step]] | None = None

    def __call__(self, size: int, root: int | None = None, **parameters: Any) -> ScheduleData:
        params = {**self.parameters, **parameters}
        rooted = {"root": root} if self.collective in ROOTED else {}
        chunks, scratch = self.number_of_chunks(size, params), _count(self.scratch, size, params, default=0)
        same_bits = self.replicas == "same" and self.collective != "barrier"
        own_contract = contract(self.collective, size, chunks, root, scratch, same_bits=same_bits)
        steps = Steps(functools.partial(self.make, size, **rooted, **params), most_steps(size))
        part = None if self.part is None or not self.trusted else functools.partial(self.part, size)
        return ScheduleData(
            self.collective, self.name, size, chunks, own_contract, steps, root, tuple(sorted(parameters.items())), part
        )

    def number_of_chunks(self, size: int, parameters: Mapping[str, Any]) -> int:
        return _count(self.chunks, size, parameters, default=1 if self.collective in _ONE_CHUNK else size)


def load_by_card(
    registered: Algorithm,
    hosts: Hosts,
    parameters: tuple[tuple[str, Any], ...] = (),
    most_messages: float = math.inf,
) -> Load:
    """The load of an algorithm on hosts, from its card; without one for these hosts, its steps are counted.

    Up to 512 ranks the steps of an algorithm that a user has registered are counted even if it has a card, which may be
    wrong. Above that it needs a card (ValueError), because counting the steps may take hours.

    Raises TooManyMessages if the load has not been computed before, and the card shows that the busiest rank has more
    than ``most_messages`` between hosts. The load is not computed then.

    >>> load_by_card(lookup("all_reduce", "ring"), Hosts((8,) * 12_500)).steps
    199998
    """
    known = _known_load(_changes, registered, hosts, parameters)
    if not known:
        known.append(_new_load(registered, hosts, parameters, most_messages))
    return known[0]


@functools.lru_cache(maxsize=1024)
def _known_load(
    _version: int, _registered: Algorithm, _hosts: Hosts, _parameters: tuple[tuple[str, Any], ...]
) -> list[Load]:
    """A list for the load of an algorithm, which is empty until load_by_card() has computed the load."""
    return []


def _new_load(
    registered: Algorithm, hosts: Hosts, parameters: tuple[tuple[str, Any], ...], most_messages: float
) -> Load:
    params = {**registered.parameters, **dict(parameters)}
    card_load = None if registered.card is None else registered.card.load
    if registered.built_in and params.get("hosts", ()) is None and len(hosts.ranks) == 1:  # a hierarchy's default hosts
        ranks = default_ranks_a_host(hosts.size)
        square = Hosts((ranks,) * (hosts.size // ranks), one_machine=True, has_cores=hosts.has_cores)
        return load_by_card(registered, square, (*parameters, ("hosts", square.ranks))).on_one_host(ranks)
    is_for_others = "hosts" in params and params["hosts"] != hosts.ranks  # made for other hosts than those it runs on
    is_counted = is_for_others if registered.built_in else hosts.size <= _MOST_RANKS_COUNTED
    if is_counted:
        root = 0 if registered.collective in ROOTED else None
        return count(registered(hosts.size, root, **dict(parameters)), hosts)
    if card_load is None:
        name = f"{registered.collective} {registered.name!r}"
        raise ValueError(f"{name} has no card with a load, and above {_MOST_RANKS_COUNTED} ranks no steps are counted")
    share = 0.0 if registered.collective == "barrier" else 1 / registered.number_of_chunks(hosts.size, params)
    params.pop("hosts", None)
    load = load_of(card_load(hosts, **params), hosts, share, most_messages)
    if not registered.built_in and not (np.isfinite(load.rows).all() and (load.rows >= 0).all()):
        raise ValueError(f"the card of {registered.collective} {registered.name!r} gives a load that is no count")
    return load


_ONE_CHUNK = ("barrier", "scan", "exclusive_scan")
_registry: dict[tuple[str, str], Algorithm] = {}
_changes = 0
# Algorithms are sorted by the names of their modules; a module of this table comes just before the one that it names,
# which imports it.
_SORTED_BEFORE = {"ring": "large_rooted", "swing": "bine", "tree": "double_tree"}


def _count(count: Count, size: int, parameters: Mapping[str, Any], default: int) -> int:
    return default if count is None else count(size, **parameters) if callable(count) else count


def algorithm(
    collective: str,
    *,
    name: str | None = None,
    chunks: Count = None,
    scratch: Count = None,
    replicas: str = "same",
    card: Card | None = None,
    trust: bool = False,
    variants: Sequence[Mapping[str, Any]] = (),
    part: Callable[..., Iterator[Step]] | None = None,
) -> Callable[[_Make], _Make]:
    """Register a generator function ``make(size, root=..., **parameters)`` that yields the steps, or returns phases.

    ``chunks``: the number of pieces of the data; by default ``size``, and 1 for barrier and scans. ``scratch``: further
    chunks for data in transit. Each is a number, or a function of size and the parameters.

    ``replicas="may differ"``: ranks may add in different orders, so that their results may differ in the last bits;
    by default ``verify()`` refuses such an algorithm. ``trust=True``: the algorithm runs without a proof. By default it
    is proved before its first run for a number of ranks, and refused above 512 ranks. ``variants``: parameters, other
    than the defaults, with which a choice by price considers the algorithm too. ``part(size, rank)``: generates the
    rows of one rank alone, for algorithms of n^2 rows in which each rank sends what it has at the start. It is not used
    without ``trust``, because ``make`` is what is proved.

    Every rank must register the same steps under a name; calls compare them. The names of this package are taken.

    >>> from dist_prims.schedules import Step, build
    >>> @algorithm("all_reduce", name="star", chunks=1)
    ... def star(size):
    ...     for rank in range(1, size):
    ...         yield Step(src=rank, dst=0, chunk=0, reduce=True)
    ...     for rank in range(1, size):
    ...         yield Step(src=0, dst=rank, chunk=0)
    >>> schedule = build("all_reduce", "star", size=3)
    >>> schedule.verify()
    >>> print(schedule.order(chunk=0), len(schedule.steps))
    (r0+r1)+r2 4
    >>> unregister("all_reduce", "star")
    """
    _check_registration(collective, name, replicas)

    def register(make: _Make) -> _Make:
        key = collective, name or make.__name__
        built_in = make.__module__.startswith(f"{__package__}.algorithms.")
        if not built_in:
            _load()
            _check_not_built_in(*key, "register it under another name, algorithm(..., name=...)")
        defaults, trusted = _parameters_of(make, collective), trust or built_in
        if not all(isinstance(each, Mapping) and {*each} <= {*defaults} for each in variants):
            takes = ", ".join(defaults) or "none"
            raise ValueError(
                f"{collective} {key[1]!r}: variants={variants!r}: a list of mappings of parameters ({takes})"
            )
        every = tuple(variants)
        _set(*key, Algorithm(*key, make, chunks, scratch, replicas, card, defaults, trusted, built_in, every, part))
        return make

    return register


def _check_registration(collective: str, name: str | None, replicas: str) -> None:
    if collective not in COLLECTIVES:
        raise ValueError(f"algorithm({collective!r}): {nearest('collective', collective, COLLECTIVES)}")
    if not isinstance(name, str | None):
        raise ValueError(f"algorithm({collective!r}, name={name!r}): the name must be text")
    if replicas not in ("same", "may differ"):
        raise ValueError(f"algorithm(replicas={replicas!r}): use 'same' or 'may differ'")


def _check_not_built_in(collective: str, name: str, remedy: str) -> None:
    if (collective, name) in _registry and _registry[collective, name].built_in:
        raise ValueError(f"{collective} {name!r} is an algorithm of dist_prims, which all ranks rely on; {remedy}")


def _parameters_of(make: Callable[..., Any], collective: str) -> dict[str, Any]:
    """Names and defaults of the parameters, apart from size and root; ValueError for those that cannot be called."""
    signature = inspect.signature(make).parameters
    own = {key: par.default for key, par in signature.items() if key not in ("size", "root")}
    required = {"size", "root"} if collective in ROOTED else {"size"}
    if [*signature][:1] != ["size"] or not required <= {*signature} or inspect.Parameter.empty in own.values():
        raise ValueError(
            f"{collective} {make.__name__}({', '.join(signature)}): the parameters must be "
            f"{'size, root' if 'root' in required else 'size'}, then others with a default each"
        )
    return own


def unregister(collective: str, name: str) -> None:
    """Remove an algorithm that the program registered; algorithms of the package stay.

    >>> @algorithm("barrier", name="none")
    ... def none(size):
    ...     yield from ()
    >>> unregister("barrier", "none")
    >>> algorithms("barrier")
    ['dissemination', 'hierarchical']
    """
    lookup(collective, name)
    _check_not_built_in(collective, name, "only an algorithm that the program registered can be removed")
    _set(collective, name, None)


def _set(collective: str, name: str, registered: Algorithm | None) -> None:
    global _changes
    if registered is None:
        del _registry[collective, name]
    else:
        _registry[collective, name] = registered
    _changes += 1  # last: another thread may fill a cache meanwhile


def version() -> int:
    """A number that changes when an algorithm is registered or removed; caches of what algorithms make depend on it."""
    _load()
    return _changes


@functools.cache
def _load() -> None:
    package = importlib.import_module(f"{__package__}.algorithms")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def nearest(kind: str, name: str, known: tuple[str, ...] | list[str]) -> str:
    """An error message for an unknown name: the most similar known names first, then all of them."""
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"unknown {kind} {name!r}; {hint}known: {', '.join(known)}"


def algorithms(collective: str) -> list[str]:
    """Names of the algorithms registered for a collective: those of this package, then the program's.

    Of equal prices the first one is chosen, so the order must be the same on all ranks. It does not depend on which
    module a rank has imported first.

    >>> "ring" in algorithms("all_reduce")
    True
    """
    current = version()
    if collective not in COLLECTIVES:
        raise ValueError(nearest("collective", collective, COLLECTIVES))
    return [*_names(current, collective)]


@functools.lru_cache(maxsize=32)
def _names(_version: int, collective: str) -> list[str]:
    registered = [(name, each) for (kind, name), each in [*_registry.items()] if kind == collective]
    return [name for name, each in sorted(registered, key=lambda item: _position(item[1]))]


def _position(registered: Algorithm) -> tuple[bool, str, bool]:
    """A key to sort algorithms by. Algorithms with the same key keep the order in which they were registered."""
    module = registered.make.__module__.rpartition(".")[2] if registered.built_in else ""
    return not registered.built_in, _SORTED_BEFORE.get(module, module), module not in _SORTED_BEFORE


def users_algorithms() -> list[Algorithm]:
    """The algorithms of all collectives that the program has registered."""
    return [registered for registered in _registry.values() if not registered.built_in]


def lookup(collective: str, name: str) -> Algorithm:
    """The algorithm registered under a name; ValueError with the most similar names if there is none.

    >>> lookup("all_reduce", "ring").card.evaluate("steps", size=8)
    Fraction(14, 1)
    >>> lookup("gather", "binomal")
    Traceback (most recent call last):
    ValueError: unknown gather algorithm 'binomal'; did you mean 'binomial'? known: binomial, direct, hierarchical
    """
    _load()
    if registered := _registry.get((collective, name)):
        return registered
    raise ValueError(nearest(f"{collective} algorithm", name, algorithms(collective)))
