"""Argument types of the benchmark commands: sizes, dtypes, positive integers."""

from __future__ import annotations

import argparse

import torch

from ..schedules.advice import parse_bytes

__all__: list[str] = []


def sizes(text: str) -> list[int]:
    """Parse sizes in bytes: a list, or a range that doubles, or grows by the factor after ``/``.

    >>> sizes("8,64K,1M"), sizes("1K:8K"), sizes("1K:16K/4")
    ([8, 65536, 1048576], [1024, 2048, 4096, 8192], [1024, 4096, 16384])
    """
    if ":" not in text:
        return [size(each) for each in text.split(",")]
    low, _, rest = text.partition(":")
    high, _, by = rest.partition("/")
    found, last, factor = [size(low)], size(high), size(by or "2")
    if not 0 < found[0] <= last or factor < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not an increasing range; write low:high or low:high/factor")
    while found[-1] * factor <= last:
        found.append(found[-1] * factor)
    return found


def size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def dtype(text: str) -> torch.dtype:
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise argparse.ArgumentTypeError(f"{text!r} is not a torch dtype; write float32, bfloat16 or int64")
    return found


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)
