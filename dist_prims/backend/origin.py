"""How a group came to be, and what follows from it.

| origin       | its group is made by                                                   |
| ------------ | ---------------------------------------------------------------------- |
| launched     | ``init_process_group`` or ``new_group``                                |
| split        | ``split_group`` of another group                                       |
| merged       | ``merge_remote_group`` of groups, perhaps of several jobs              |
| survived     | ``shrink`` of another group                                            |
| grown        | ``grow`` of the running ranks, and ``join`` of the new ones            |
| reconfigured | torch's ``reconfigure``: the program has chosen any processes          |

A group has *traits*, on which its creation depends: those that its origin implies (``IMPLIED``), and those that it
inherits from the groups from which it is made, which is every trait but LISTED.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, Flag, auto
from typing import Any

from .options import BackendOptions

__all__: list[str] = []


class Origin(Enum):
    """How a group came to be."""

    LAUNCHED = auto()
    SPLIT = auto()
    MERGED = auto()
    SURVIVED = auto()
    GROWN = auto()
    RECONFIGURED = auto()


class Trait(Flag):
    """What holds for a group because of its origin, or because of the origin of a group that it was made from."""

    NONE = 0
    LISTED = auto()  # every rank passes the list of all ranks: the lists are compared
    MANY_NAMES = auto()  # its ranks may know it by different names
    SEVERAL_LAUNCHERS = auto()  # some ranks may not know the secret that the launcher of the others has given them
    WITHOUT_MPI = auto()  # its ranks are not all of the living ranks of one MPI job
    NO_GLOBAL_RANKS = auto()  # the default group may not contain its ranks, so that it cannot tell which have ended
    OWN_STORE = auto()  # the store that torch passes to its children is not the store by which its ranks have met


IMPLIED = {
    Origin.LAUNCHED: Trait.NONE,
    Origin.SPLIT: Trait.LISTED,
    Origin.MERGED: Trait.MANY_NAMES | Trait.SEVERAL_LAUNCHERS | Trait.WITHOUT_MPI | Trait.NO_GLOBAL_RANKS,
    Origin.SURVIVED: Trait.WITHOUT_MPI,  # an MPI that has lost a process cannot go on
    Origin.GROWN: Trait.SEVERAL_LAUNCHERS | Trait.WITHOUT_MPI,
    Origin.RECONFIGURED: Trait.MANY_NAMES | Trait.WITHOUT_MPI | Trait.OWN_STORE,
}


@dataclass(frozen=True)
class Repairs:
    """Functions of ``dist_prims.repair``, a higher layer, which torch calls by the backend of a group."""

    shrink: Callable[[Any, Sequence[int]], Any]  # repair.shrink_backend
    make_handle: Callable[[int], str]  # repair.reconfigure_handle
    reconfigure: Callable[..., Any]  # repair.reconfigured_backend


@dataclass(frozen=True, eq=False)
class GroupRequest:
    """The parameters of a group on one of its ranks."""

    store: Any  # in which the ranks meet
    name: str
    rank: int  # this rank in the group
    size: int
    timeout: timedelta  # of collectives, and of the creation of the group
    ranks: Sequence[int]  # the global ranks; empty for a default group, and if they are unknown
    given: BackendOptions | None  # the options of the caller
    origin: Origin
    repairs: Repairs
    inherited: Trait = Trait.NONE  # from the groups that this group is made from, and what does not follow from origin
    # The number of the request in this process: of two groups of one name the later request counts.
    order: int = field(init=False, default_factory=itertools.count(1).__next__)

    @property
    def all_ranks(self) -> list[int]:
        """The global ranks; if they are unknown, the ranks within the group."""
        return [*self.ranks] or list(range(self.size))

    @property
    def traits(self) -> Trait:
        return IMPLIED[self.origin] | self.inherited

    @property
    def heritage(self) -> Trait:
        """The traits that groups which are made from this one inherit."""
        return self.traits & ~Trait.LISTED

    @property
    def common_name(self) -> str:
        """The name by which all ranks know the group; empty if they may know it by different names."""
        return "" if Trait.MANY_NAMES in self.traits else self.name
