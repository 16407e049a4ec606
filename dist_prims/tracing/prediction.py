"""The time that the cost model predicts for a traced collective, step by step."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..schedules.cost import step_seconds
from ..schedules.host_order import HostOrder
from ..schedules.load import Hosts, count
from ..schedules.registry import lookup
from ..schedules.schedule import Schedule
from ..schedules.schedule_builder import build
from ..schedules.topology import Topology
from ..schedules.trust import without_fingerprint
from .reader import CollectiveCall

__all__: list[str] = []


def predicted_steps(call: CollectiveCall, levels: Mapping[str, Any] | None = None) -> list[float] | None:
    """The predicted seconds of each step; None if the schedule or the costs of the group are not known.

    ``levels``: the costs of messages within a host and between hosts; by default the costs that the group had. A
    collective through the slots of shared memory has no messages, so no cost of a message applies to it.
    """
    levels = levels or call.group.facts.get("levels")
    if not call.algorithm or levels is None:
        return None
    hosts = call.group.facts.get("hosts") or [""] * len(call.group.ranks)
    order = HostOrder.of(hosts)
    root = order.rank_at.index(call.root) if call.root >= 0 else None
    steps = _predict(call.what, call.algorithm, order.hosts, root, json.dumps(levels), call.nbytes)
    return None if steps is None else list(steps)


@functools.lru_cache(maxsize=256)  # calls of a training repeat; ``levels`` is JSON because a dict cannot be a key
def _predict(
    collective: str, algorithm: str, hosts: tuple[int, ...], root: int | None, levels: str, nbytes: int
) -> tuple[float, ...] | None:
    try:
        schedule = _schedule(collective, algorithm, hosts, root)
        topology = Topology.measured(hosts, json.loads(levels))
    except ValueError:  # an algorithm that only the program has registered
        return None
    load = count(schedule, Hosts.of(topology))
    return tuple(np.repeat(step_seconds(load, nbytes, topology), load.times).tolist())


def _schedule(collective: str, algorithm: str, hosts: tuple[int, ...], root: int | None) -> Schedule:
    """The schedule of a name such as ``ring`` or ``tree(degree=2)``. The backend also writes ``tree(2)``: a value
    without a name belongs to the next parameter in alphabetical order."""
    base, _, text = without_fingerprint(algorithm).partition("(")
    known = lookup(collective, base).parameters
    parameters: dict[str, Any] = {} if root is None else {"root": root}
    if "hosts" in known:
        parameters["hosts"] = hosts
    unnamed = iter(name for name in sorted(known) if name != "hosts")
    for argument in filter(None, re.split(r",\s*", text.rstrip(")"))):
        name, equals, value = argument.rpartition("=")
        parameters[name if equals else next(unnamed, "")] = int(value) if value.isdigit() else value
    return build(collective, base, sum(hosts), **parameters)
