"""``spawn()``: run a function on several ranks of this host, and return its results or raise the first failure.

A simple implementation with processes and a queue hangs when a rank dies before it answers, reports errors that are
consequences instead of the first error, and leaves ranks running when the parent dies. This implementation differs:

- The parent waits for answers *and* deaths at once, by a pidfd for each rank: a socket that a rank's own children
  inherit never reports end of file.
- A failing rank keeps its connections open until the parent has received its error.
- No rank outlives the call: the parent kills all ranks when the call ends, and the kernel kills them if the parent
  dies.

Ranks are forked where that is safe, which takes some ten milliseconds a rank. Elsewhere they are fresh interpreters.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..autoload import prepare
from .spawn_parent import Opened, RankProcesses

__all__: list[str] = []


def spawn(
    fn: Callable[..., Any],
    nprocs: int,
    args: tuple[Any, ...] = (),
    *,
    backend: str | None = None,
    start_timeout: float = 60.0,
    timeout: float | None = None,
    init: bool = True,
    start_method: str | None = None,
    prefix: bool | None = None,
    min_ranks: int | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` on ``nprocs`` ranks that have joined a group, and return the results by rank.

    >>> import torch
    >>> def sum_of_ranks():
    ...     total = torch.tensor(torch.distributed.get_rank())
    ...     torch.distributed.all_reduce(total)
    ...     return total.item()
    >>> spawn(sum_of_ranks, 3)
    [3, 3, 3]

    When a rank raises or dies, ``spawn`` ends the others and raises :class:`RankFailedError` for the first failure. A
    rank whose ``fn`` has returned leaves its groups: other ranks that wait for it raise :class:`PeerLeftError`. A group
    of gloo waits until its timeout, or the timeout of ``spawn``. The parent forwards the output of the ranks line by
    line to its own ``sys.stdout`` and ``sys.stderr``.

    - ``backend``: of the group, with the default of :func:`init`.
    - ``start_timeout``: the seconds for all ranks to start and join the group, and again for destroying it at the end.
    - ``timeout``: the seconds for ``fn``, from the moment the last rank has joined. None, the default, sets no limit; a
      collective then waits for 5 minutes, as after ``init()``. When one of the times has passed, a ``TimeoutError``
      names the ranks that were still busy, and those that had returned, and shows the stacks.
    - ``init``: whether the ranks join a group. If not, ``fn`` itself joins one.
    - ``start_method``: "fork", the default unless CUDA or a group is in use in this process, or "spawn". Forked ranks
      compute with one thread, because OpenMP's threads do not survive a fork. "spawn" starts fresh interpreters, which
      takes seconds, and sends them ``fn`` and ``args``, by value if they cannot be imported there.
    - ``prefix``: whether each line of output begins with ``[rank 0]``; by default on a terminal and in a notebook, if
      there is more than one rank.
    - ``min_ranks``: deaths are accepted as long as so many ranks are left, which can go on by
      :func:`dist_prims.shrink`. The result of a rank that has died is None. By default no death is accepted.
    """
    if nprocs < 1:
        raise ValueError(f"spawn: nprocs is {nprocs}; a group has at least one rank")
    if min_ranks is not None and not 1 <= min_ranks <= nprocs:
        raise ValueError(f"spawn: min_ranks is {min_ranks}; choose a number from 1 to nprocs, which is {nprocs}")
    for name, seconds in (("start_timeout", start_timeout), ("timeout", timeout)):
        if seconds is not None and not seconds > 0:
            raise ValueError(f"spawn: {name} is {seconds} s; give a positive time")
    is_fork_safe = not (torch.cuda.is_initialized() or dist.is_initialized())
    method = start_method or ("fork" if is_fork_safe else "spawn")
    if method not in ("fork", "spawn"):
        raise ValueError(f"spawn: start_method is {method!r}; choose 'fork' or 'spawn'")
    prepared = prepare(backend) if backend or init else None
    with Opened() as opened:
        processes = RankProcesses(nprocs, start_timeout, timeout, prefix, min_ranks or nprocs, opened)
        processes.start(method, fn, args, prepared if init else None)
        results = processes.results()
        processes.finish()
    return results
