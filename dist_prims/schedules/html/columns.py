"""A compact form for columns of integers in the data of a page."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

__all__: list[str] = []


def column(values: ArrayLike) -> Any:
    """One number if all values are equal, ``{"from": a}`` for a, a+1, a+2, ..., else the list.

    >>> column([3, 3]), column([4, 5, 6]), column([1, 0]), column([])
    (3, {'from': 4}, [1, 0], [])
    """
    array = np.asarray(values, np.int64)
    if not array.size:
        return []
    if (array == array[0]).all():
        return int(array[0])
    if (np.diff(array) == 1).all():
        return {"from": int(array[0])}
    return array.tolist()
