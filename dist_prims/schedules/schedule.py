"""Schedule: the steps of a collective with its proof, price, order of additions, simulation, picture and page.

The data and the functions on it are in modules of their own, which know nothing of this class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from ..units import check_bytes
from .cost import Cost, lower_bound, price, seconds
from .graph import Graph
from .graph_cost import link_loads
from .order import Order, order
from .proof import verify
from .simulate import simulate
from .steps import ScheduleData
from .topology import Topology

__all__: list[str] = []


@dataclass(frozen=True, eq=False, repr=False)
class Schedule(ScheduleData):
    """The steps of one collective for one number of ranks, and the contract that they must fulfil.

    ``chunks``: the number of pieces that the data is split into. ``contract``: the chunk numbers under which each rank
    finds its input and leaves its output. Other chunk numbers are scratch. ``part``: the rows of one rank in each step,
    if every row reads a chunk that its sender has from the start and reduces nothing.

    >>> from dist_prims.schedules import build
    >>> ring = build("all_reduce", "ring", size=4)
    >>> ring
    Schedule(collective='all_reduce', algorithm='ring', size=4, chunks=4, root=None, parameters=())
    >>> ring.verify()  # or ScheduleError
    >>> print(ring.order(chunk=0))
    ((r0+r1)+r2)+r3
    >>> round(ring.cost(nbytes=1e6, alpha=50e-6, beta=1e-9), 6)  # seconds
    0.0018
    """

    @staticmethod
    def of(data: ScheduleData) -> Schedule:
        return Schedule(*(getattr(data, field.name) for field in fields(data)))

    def verify(self) -> None:
        """Prove the schedule by symbolic execution, or raise ScheduleError with a counterexample."""
        verify(self)

    @overload
    def cost(self, nbytes: float, alpha: float, beta: float, gamma: float = 0.0) -> float: ...
    @overload
    def cost(self, nbytes: float, *, topology: Topology | Graph) -> float: ...
    def cost(
        self,
        nbytes: float,
        alpha: float | None = None,
        beta: float | None = None,
        gamma: float = 0.0,
        *,
        topology: Topology | Graph | None = None,
    ) -> float:
        """Seconds for data of ``nbytes`` on equal ranks, or on the hosts and links of a topology or graph.

        ``alpha``: seconds a message; ``beta``: a byte sent or received; ``gamma``: a byte reduced.
        """
        check_bytes("cost", nbytes)
        if isinstance(topology, Graph):
            return link_loads(self, topology).seconds(nbytes)
        if topology is not None:
            return seconds(self, nbytes, topology)
        if alpha is None or beta is None:
            raise TypeError("cost() requires alpha and beta, or topology=")
        return self.price.seconds(nbytes, alpha, beta, gamma)

    @cached_property
    def price(self) -> Cost:
        """The counts of the critical path: messages, data moved, data reduced."""
        return price(self)

    def lower_bound(self, nbytes: float, alpha: float, beta: float, gamma: float = 0.0) -> float:
        """A lower bound in seconds for any algorithm of this collective, in the model of :meth:`cost`."""
        return lower_bound(self.collective, self.size).seconds(nbytes, alpha, beta, gamma)

    def order(self, chunk: int, rank: int | None = None) -> Order:
        """The exact expression of additions behind an output chunk, e.g. ``((r2+r3)+r0)+r1``."""
        return order(self, chunk, rank)

    def simulate(self, inputs: Sequence[Any], op: Callable[[Any, Any], Any] = np.add) -> list[Any]:
        """Run the schedule on NumPy arrays in one process, one input a rank; returns the output of each rank."""
        return simulate(self, inputs, op)

    def draw(self, path: str | Path, animate: bool = False, topology: Graph | None = None) -> Path:
        """Write the steps as an SVG picture and return its path; ``animate``: they appear one after the other.

        ``topology``: a graph, to draw how long each of its links works instead of the steps.
        """
        from .draw import write_loads, write_svg

        return write_svg(self, path, animate) if topology is None else write_loads(self, topology, path)

    def html(self, path: str | Path) -> Path:
        """Write an interactive page: its steps, what each chunk holds, the proof and the cost. Returns the path.

        The page of a schedule that is wrong opens at the first wrong step.
        """
        from .html.document import write_html
        from .html.schedule_data import schedule_page

        return write_html(schedule_page(self), path)

    def save(self, path: str | Path, format: str | None = None) -> Path:
        """Write the steps and the contract to a JSON file, and return its path.

        ``format``: ``"msccl"`` writes an MSCCL algorithm as XML instead, ``"mscclpp"`` an execution plan of MSCCL++ as
        JSON; ValueError for a collective that they lack, and for a file that :meth:`load` would refuse.
        """
        from .file import write_schedule

        return write_schedule(self, path, format)

    @staticmethod
    def load(path: str | Path) -> Schedule:
        """Read the schedule of a file that :meth:`save` has written, in any format, and prove it.

        Raises ScheduleError for steps that are wrong, and ValueError for a file that is no schedule. To run the
        schedule, register its steps under a name on every rank.

        >>> import tempfile
        >>> from dist_prims.schedules import Schedule, algorithm, build, unregister
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ring = Schedule.load(build("all_reduce", "ring", size=3).save(f"{folder}/ring.json"))
        >>> _ = algorithm("all_reduce", name="from a file", chunks=ring.chunks)(lambda size: iter(ring.steps))
        >>> build("all_reduce", "from a file", size=3).verify()
        >>> unregister("all_reduce", "from a file")
        """
        from .file import read_schedule

        return Schedule.of(read_schedule(path))

    def _repr_html_(self) -> str | None:
        """The page, for a notebook; None, and so the text, for a schedule too large for a page."""
        from .html.document import in_notebook
        from .html.schedule_data import schedule_page

        try:
            return in_notebook(schedule_page(self))
        except ValueError:
            return None
