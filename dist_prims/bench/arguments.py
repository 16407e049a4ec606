"""Arguments of the benchmark commands (types for ``argparse``), and the start of their ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection

import torch

from ..launch import detect, init, spawn
from ..units import parse_bytes

__all__: list[str] = []

TIMEOUT = 3600.0  # seconds of a whole benchmark


def run_on_ranks(
    program: Callable[[argparse.Namespace], int],
    options: argparse.Namespace,
    backend: str | None = None,
    wait_timeout: float = TIMEOUT,
) -> int:
    """Run ``program(options)`` on the ranks of a launcher, or else on ``options.ranks`` ranks that are started here;
    return the largest result. ``backend``: of the default group; ``wait_timeout``: seconds of a wait under a
    launcher."""
    if detect().size != 1:
        init(backend, timeout=wait_timeout)
        return program(options)
    return int(max(spawn(program, options.ranks, (options,), backend=backend, timeout=TIMEOUT, prefix=False)))


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """An argument type: a list of some of the ``known`` names."""

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {' or '.join(known)}")
        return chosen

    return names


def sizes(text: str) -> list[int]:
    """Parse sizes in bytes: a list, or a range that doubles, or grows by the factor after ``/``.

    >>> sizes("8,64K,1M"), sizes("1K:8K"), sizes("1K:16K/4")
    ([8, 65536, 1048576], [1024, 2048, 4096, 8192], [1024, 4096, 16384])
    """
    if ":" not in text:
        return [size(each) for each in text.split(",")]
    low, _, rest = text.partition(":")
    high, _, by = rest.partition("/")
    growing, last, factor = [size(low)], size(high), size(by or "2")
    if not 0 < growing[0] <= last or factor < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not an increasing range; write low:high or low:high/factor")
    while growing[-1] * factor <= last:
        growing.append(growing[-1] * factor)
    return growing


def size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def dtype(text: str) -> torch.dtype:
    named = getattr(torch, text, None)
    if not isinstance(named, torch.dtype):
        raise argparse.ArgumentTypeError(f"{text!r} is not a torch dtype; write float32, bfloat16 or int64")
    return named


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)
