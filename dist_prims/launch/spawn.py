"""Run a function on several ranks of this host and bring its results, or the first failure, back.

The obvious way, processes and a queue, hangs when a rank dies before it answers, hides the error that came first behind
the errors that it caused, and leaves ranks behind when the parent goes. Here the parent waits for answers *and* deaths
at once (a pidfd each: a socket that a rank's own children inherit never ends), a failing rank keeps its connections
open until the parent has heard it, and no rank outlives the call: killed when it ends, and by the kernel if the parent
dies.

Ranks are forked where that is safe: a rank then costs some ten milliseconds. Elsewhere they are fresh interpreters.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .spawn_parent import RankFailed, Team

__all__ = ["RankFailed", "spawn"]


def spawn(
    fn: Callable[..., Any],
    nprocs: int,
    args: tuple[Any, ...] = (),
    *,
    backend: str = "gloo",
    start_timeout: float = 60.0,
    timeout: float | None = None,
    init: bool = True,
    start_method: str | None = None,
    prefix: bool | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` on ``nprocs`` ranks that have joined a group, and return the results by rank.

    >>> import torch
    >>> def sum_of_ranks():
    ...     total = torch.tensor(torch.distributed.get_rank())
    ...     torch.distributed.all_reduce(total)
    ...     return total.item()
    >>> spawn(sum_of_ranks, 3)
    [3, 3, 3]

    The first rank that raises or dies ends the others and is raised here as :class:`RankFailed`. ``start_timeout`` is
    the time in seconds for all ranks to start and join, and afterwards to leave. ``timeout`` is the time for ``fn``,
    from the moment the last rank has joined. None, the default, sets no limit; a collective then waits for 5 minutes,
    as after ``init()``. When either has passed, a ``TimeoutError`` says which ranks were still busy, and where.

    What ranks print comes line by line, on this process's ``sys.stdout`` and ``sys.stderr``. With ``prefix`` each line
    begins with ``[rank 0]``; the default is to do so on a terminal and in a notebook if there is more than one rank.

    ``init=False`` leaves joining to ``fn``. Forked ranks (``start_method`` "fork", the default unless CUDA or a group
    is in use here) compute with one thread: OpenMP's do not survive a fork. With "spawn", ranks are fresh interpreters,
    which take seconds to start; ``fn`` and ``args`` travel to them, by value if they cannot be imported there.
    """
    if nprocs < 1:
        raise ValueError(f"spawn: nprocs is {nprocs}; a group has at least one rank")
    for name, seconds in (("start_timeout", start_timeout), ("timeout", timeout)):
        if seconds is not None and not seconds > 0:
            raise ValueError(f"spawn: {name} is {seconds} s; give a time that can pass")
    method = start_method or _safe_start_method()
    if method not in ("fork", "spawn"):
        raise ValueError(f"spawn: start_method is {method!r}; choose 'fork' or 'spawn'")
    with Team(nprocs, start_timeout, timeout, prefix) as team:
        team.start(method, fn, args, backend, init)
        results = team.results()
        team.dismiss()
    return results


def _safe_start_method() -> str:
    in_use = torch.cuda.is_initialized() or dist.is_initialized()  # type: ignore[no-untyped-call]
    return "spawn" if in_use else "fork"
