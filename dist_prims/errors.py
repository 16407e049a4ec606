"""The exceptions of collectives. Each is a ``torch.distributed.DistBackendError``, so existing handlers catch them.

>>> import dist_prims
>>> import torch.distributed as dist
>>> issubclass(MismatchError, dist.DistBackendError)
True
"""

from __future__ import annotations

from torch.distributed import DistBackendError

__all__ = [
    "CommError",
    "CommInterruptedError",
    "CommTimeoutError",
    "LeftOutError",
    "MismatchError",
    "PeerDiedError",
    "PeerLeftError",
]


class CommError(DistBackendError):
    """Ranks of a group could not finish a collective. The message names rank, operation and remedy.

    The base class of the other errors:

    >>> import torch, dist_prims
    >>> import torch.distributed as dist
    >>> def reduce_unequal():
    ...     try:
    ...         dist.all_reduce(torch.ones(2 + dist.get_rank()))
    ...     except CommError as error:
    ...         return type(error).__name__
    >>> dist_prims.spawn(reduce_unequal, 2, backend="dist_prims", timeout=60)
    ['MismatchError', 'MismatchError']
    """


class MismatchError(CommError):
    """Ranks called different collectives, or one with different arguments. No data was touched; the group can go on.

    >>> import torch, dist_prims
    >>> import torch.distributed as dist
    >>> def mismatch_then_sum():
    ...     text, total = "", torch.ones(2)
    ...     try:
    ...         dist.all_reduce(torch.ones(2 + dist.get_rank()))
    ...     except MismatchError as error:
    ...         text = str(error)
    ...     dist.all_reduce(total)  # the group can go on
    ...     return text, total.tolist()
    >>> text, total = dist_prims.spawn(mismatch_then_sum, 2, backend="dist_prims", timeout=60)[0]
    >>> print(text.partition(". Every")[0])  # doctest: +NORMALIZE_WHITESPACE
    rank 0: ranks disagree, no data was touched. Rank 0 calls all_reduce(SUM, float32, 2 elements) as call number 1;
    rank 1 calls all_reduce(SUM, float32, 3 elements) as call number 1
    >>> total
    [2.0, 2.0]
    """


class PeerDiedError(CommError):
    """A rank's process was killed, or has ended with another status than 0. The group cannot go on.

    >>> import os, torch, dist_prims
    >>> import torch.distributed as dist
    >>> def die_or_reduce():
    ...     if dist.get_rank() == 1:
    ...         os._exit(1)
    ...     try:
    ...         dist.all_reduce(torch.ones(2))
    ...     except PeerDiedError as error:
    ...         return str(error)
    >>> text, _ = dist_prims.spawn(die_or_reduce, 2, backend="dist_prims", timeout=60, min_ranks=1)
    >>> print(text)  # doctest: +ELLIPSIS
    rank 0: rank 1 (process ...) has died in all_reduce(SUM, float32, 2 elements) as call number 1; ...
    """


class PeerLeftError(CommError):
    """A rank has destroyed the group, or its process has ended with status 0. The group cannot go on.

    A rank on another host that waits for the ended process gets a :class:`PeerDiedError` instead.

    >>> import torch, dist_prims
    >>> import torch.distributed as dist
    >>> def leave_early():
    ...     if dist.get_rank() == 1:
    ...         return dist.destroy_process_group()
    ...     try:
    ...         dist.all_reduce(torch.ones(2))
    ...     except PeerLeftError as error:
    ...         return str(error).partition(" as call")[0]
    >>> dist_prims.spawn(leave_early, 2, backend="dist_prims", timeout=60)[0]
    'rank 0: rank 1 has left the group in all_reduce(SUM, float32, 2 elements)'
    """


class CommTimeoutError(CommError, TimeoutError):
    """A rank did not make the call before the timeout. The group cannot go on.

    >>> import datetime, time, torch, dist_prims
    >>> import torch.distributed as dist
    >>> def wait_for_a_late_rank():
    ...     group = dist.new_group(timeout=datetime.timedelta(seconds=0.5))
    ...     if dist.get_rank() == 1:
    ...         return time.sleep(2)
    ...     try:
    ...         dist.all_reduce(torch.ones(2), group=group)
    ...     except CommTimeoutError as error:
    ...         return str(error).partition("(")[0]
    >>> dist_prims.spawn(wait_for_a_late_rank, 2, backend="dist_prims", timeout=60)[0]
    'rank 0: timeout after 500 ms in all_reduce'
    """


class CommInterruptedError(CommError):
    """A rank was interrupted within a collective. The group cannot go on.

    The interrupted rank raises the exception of its signal handler, the other ranks this error.

    >>> import signal, time, torch, dist_prims
    >>> import torch.distributed as dist
    >>> def interrupt_rank_0():
    ...     try:
    ...         if dist.get_rank() == 0:
    ...             signal.signal(signal.SIGALRM, signal.default_int_handler)
    ...             signal.setitimer(signal.ITIMER_REAL, 0.2)
    ...         else:
    ...             time.sleep(2)
    ...         dist.all_reduce(torch.ones(2))
    ...     except (KeyboardInterrupt, CommInterruptedError) as error:
    ...         return type(error).__name__
    >>> dist_prims.spawn(interrupt_rank_0, 2, backend="dist_prims", timeout=60)
    ['KeyboardInterrupt', 'CommInterruptedError']
    """


class LeftOutError(CommError):
    """The other ranks of a group have repaired it without this rank; the message says why.

    >>> issubclass(LeftOutError, CommError)
    True
    """
