"""The states of all random number generators of a rank: torch, NumPy, Python, and each CUDA device."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch

__all__: list[str] = []


def capture() -> dict[str, Any]:
    """The random states as tensors and plain values.

    >>> before = capture()
    >>> drawn = torch.rand(3), np.random.rand(3), random.random()
    >>> restore(before)
    >>> again = torch.rand(3), np.random.rand(3), random.random()
    >>> torch.equal(drawn[0], again[0]), (drawn[1] == again[1]).all().item(), drawn[2] == again[2]
    (True, True, True)
    """
    numpy: dict[str, Any] = dict(np.random.get_state(legacy=False))
    words = {**numpy["state"], "key": torch.from_numpy(numpy["state"]["key"].astype(np.int64))}
    version, numbers, next_gauss = random.getstate()
    # A save does not initialise CUDA.
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": {**numpy, "state": words},
        "python": [version, torch.tensor(numbers), next_gauss],
    }


def restore(state: dict[str, Any]) -> None:
    """Restore the states of :func:`capture`. CUDA devices without a saved state keep theirs."""
    torch.set_rng_state(state["torch"])
    for device, words in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(words, device)
    words = {**state["numpy"]["state"], "key": state["numpy"]["state"]["key"].numpy().astype(np.uint32)}
    np.random.set_state({**state["numpy"], "state": words})
    version, numbers, next_gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), next_gauss))


def derive(state: dict[str, Any], rank: int) -> None:
    """Seed a rank that was not in the save, with a function of a saved state and the rank."""
    words = zlib.crc32(state["torch"].numpy().tobytes())
    seed = int(np.random.SeedSequence([words, rank]).generate_state(1)[0])
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
