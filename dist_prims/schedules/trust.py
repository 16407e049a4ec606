"""Trust: the rules that decide which schedules may run without a proof, and by which name ranks compare schedules.

The tests of this package verify the algorithms that it registers. An algorithm that a user registers may be wrong, and
a wrong one still runs: it leaves wrong numbers on some ranks and raises nothing. So its schedule is proved before its
first run for a number of ranks, whether it is chosen by name, by size, by price or pinned. A proof takes less than a
second up to 256 ranks; above :data:`MOST_RANKS` only ``algorithm(..., trust=True)`` runs without a proof.

Two ranks may have registered different steps under one name, for example after a cell of a notebook has run on some
ranks only. The name by which ranks compare schedules therefore ends in a fingerprint of the steps, unless all its
algorithms are built in, which are the same on every rank.
"""

from __future__ import annotations

import functools
import hashlib
import re
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from .registry import Algorithm, algorithms, lookup, users_algorithms
from .schedule import Schedule
from .schedule_builder import build_shared
from .schedule_error import ScheduleError
from .steps import ScheduleData, Step

__all__: list[str] = []

T = TypeVar("T")

MOST_RANKS = 512
LONGEST_NAME = 47  # characters of an algorithm's name in the header of a call
_DIGITS = 12  # of a fingerprint in a name
_FINGERPRINT = re.compile(rf"#[0-9a-f]{{{_DIGITS}}}$")


def _users_algorithms(collective: str, algorithm: str, parameters: Mapping[str, Any]) -> list[Algorithm]:
    """The algorithms that are not built in, of this one and of every algorithm named by one of its parameters."""
    whole, parts = lookup(collective, algorithm), {value for value in parameters.values() if isinstance(value, str)}
    named = [each for each in users_algorithms() if each is not whole and each.name in parts] if parts else []
    return named if whole.built_in else [whole, *named]


def _users_algorithms_of(schedule: ScheduleData) -> list[Algorithm]:
    return _users_algorithms(schedule.collective, schedule.algorithm, dict(schedule.parameters))


def is_trusted(schedule: ScheduleData) -> bool:
    """Whether the algorithm, and every algorithm named by one of its parameters, is built in or marked as trusted."""
    return all(each.trusted for each in _users_algorithms_of(schedule))


def may_be_chosen(registered: Algorithm, size: int) -> bool:
    """Whether the algorithm may be chosen automatically: its ranks end with the same bits, and it can be proved."""
    return registered.replicas == "same" and (registered.trusted or size <= MOST_RANKS)


def evaluated(
    evaluate: Callable[[Callable[[], Schedule]], T], collective: str, algorithm: str, size: int, /, **parameters: Any
) -> T | None:
    """The value of ``evaluate`` for a schedule that may be chosen automatically; None if it may not be chosen.

    ``evaluate`` is called with a function that builds the schedule.

    A schedule with algorithms of a user is proved first. If it is wrong, or if it or ``evaluate`` raises, one warning
    of the process names its algorithms: a call that does not name an algorithm must not fail because of it. Every rank
    proves for itself and comes to the same result, so that no rank waits for another.
    """
    build = functools.partial(build_shared, collective, algorithm, size, **parameters)
    user_algorithms = _users_algorithms(collective, algorithm, parameters)
    if not user_algorithms:
        return evaluate(build)
    is_proved = all(each.trusted for each in user_algorithms)
    if not is_proved and size > MOST_RANKS:
        return None
    try:
        if not (problem := "" if is_proved else problem_of(build())):
            return evaluate(build)
    except Exception as error:
        problem = _text(error)
    _warn_once(user_algorithms, lookup(collective, algorithm), size, problem)
    return None


def priced(
    price: Callable[[Callable[[], Schedule]], T], collective: str, algorithm: str, size: int, /, **parameters: Any
) -> T | None:
    """Call :func:`evaluated` for a candidate; None, with a warning, also if an algorithm of this package raises."""
    try:
        return evaluated(price, collective, algorithm, size, **parameters)
    except Exception as error:
        whole = lookup(collective, algorithm)
        _warn_once([whole], whole, size, _text(error))
        return None


_warned: weakref.WeakSet[Algorithm] = weakref.WeakSet()


def _warn_once(left_out: list[Algorithm], whole: Algorithm, size: int, problem: str) -> None:
    if all(each in _warned for each in left_out):
        return
    _warned.update(left_out)
    names = " and ".join(f"{each.collective} {each.name!r}" for each in left_out)
    part = "" if whole in left_out else f", as a part of {whole.name!r},"
    warnings.warn(
        f"{names} for {size} ranks{part} is not chosen automatically: {problem}. {_advice(left_out)}",
        stacklevel=3,
    )


def _advice(left_out: list[Algorithm]) -> str:
    if left_out[0].built_in:
        return "This is a bug of dist_prims; report it with this text"
    return f"Correct it, or {_remedy(left_out)}"


def _remedy(user_algorithms: list[Algorithm]) -> str:
    calls = (f"dist_prims.schedules.unregister({each.collective!r}, {each.name!r})" for each in user_algorithms)
    return f"unregister it ({' and '.join(calls)})"


def remedy_of(schedule: ScheduleData) -> str:
    """How to remove the algorithms of a schedule that a user has registered."""
    return _remedy(_users_algorithms_of(schedule))


def _text(error: Exception) -> str:
    return f"it raises {type(error).__name__}: {error}"


def problem_of(schedule: Schedule) -> str:
    """What is wrong with a schedule; empty if it is correct. Equal steps are proved once in a process."""
    digest = fingerprint(schedule)
    if digest not in _problems:
        try:
            schedule.verify()
            _problems[digest] = ""
        except ScheduleError as error:
            _problems[digest] = str(error)
        except Exception as error:  # of the user's generator
            return _text(error)
    return _problems[digest]


_problems: dict[str, str] = {}  # by fingerprint


@functools.lru_cache(maxsize=256)
def fingerprint(schedule: ScheduleData) -> str:
    """A hash of the steps and of what the proof demands; equal schedules have equal hashes on all ranks.

    An exception of the generator is part of the hash: a rank whose generator raises must still compare its call.
    """
    demands = schedule.contract.total, schedule.contract.same_bits
    sha = hashlib.sha256(repr((schedule.collective, schedule.size, schedule.chunks, schedule.root, *demands)).encode())
    try:
        for step in _executed_steps(schedule):
            for column in (step.src, step.dst, step.chunk, step.into, step.reduce):
                sha.update(len(column).to_bytes(8, "little") + column.tobytes())
    except Exception as error:
        sha.update(type(error).__name__.encode())
    return sha.hexdigest()


def _executed_steps(schedule: ScheduleData) -> Iterator[Step]:
    """The steps that the ranks execute; of an algorithm with ``part``, the rows of each rank, rank after rank."""
    if schedule.part is None:
        yield from schedule.steps
    else:
        for rank in range(schedule.size):
            yield from schedule.part(rank)


def name_to_compare(schedule: ScheduleData, name: str, longest: int = LONGEST_NAME) -> str:
    """The name by which ranks compare schedules, in the header of a call.

    >>> from dist_prims.schedules import Step, algorithm, build, unregister
    >>> @algorithm("broadcast", name="mine", chunks=1)
    ... def mine(size, root):
    ...     yield Step(src=root, dst=[rank for rank in range(size) if rank != root], chunk=0)
    >>> len(name_to_compare(build("broadcast", "mine", 3), "mine")) - len("mine#")
    12
    >>> name_to_compare(build("broadcast", "binomial", 3), "binomial")
    'binomial'
    >>> unregister("broadcast", "mine")

    The name of a schedule that no registered algorithm has made, as by ``bench calibrate``, has a fingerprint too.
    """
    is_registered = schedule.algorithm in algorithms(schedule.collective)
    if is_registered and not _users_algorithms_of(schedule):
        return shortened(name, longest)
    return f"{shortened(name, longest - _DIGITS - 1)}#{fingerprint(schedule)[:_DIGITS]}"


def without_fingerprint(name: str) -> str:
    """The name without the fingerprint that :func:`name_to_compare` appends.

    >>> without_fingerprint("mine#0123456789ab"), without_fingerprint("ring")
    ('mine', 'ring')
    """
    return _FINGERPRINT.sub("", name)


def shortened(name: str, longest: int = LONGEST_NAME) -> str:
    """A name that fits the header of a call; ranks compare schedules by name, so a longer one ends in a checksum."""
    return name if len(name) <= longest else f"{name[: longest - 9]}~{zlib.crc32(name.encode()):08x}"
