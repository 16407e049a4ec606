"""The UCI optical digits: real handwriting, learned in seconds. ``digits.txt`` has source and licence."""

from __future__ import annotations

import gzip
from importlib import resources

import numpy as np
import torch

__all__: list[str] = []


def digits() -> torch.utils.data.TensorDataset:
    """1,797 images of 1 x 8 x 8 with values from 0 to 1, and their digits as labels.

    >>> images, labels = digits().tensors
    >>> images.shape, images.max().item(), labels[:10].tolist()
    (torch.Size([1797, 1, 8, 8]), 1.0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    packed = resources.files(__package__).joinpath("digits.csv.gz").read_bytes()
    rows = np.loadtxt(gzip.decompress(packed).decode().splitlines(), delimiter=",", dtype=np.uint8)
    images = torch.from_numpy(rows[:, :64].astype(np.float32) / 16).view(-1, 1, 8, 8)
    return torch.utils.data.TensorDataset(images, torch.from_numpy(rows[:, 64].astype(np.int64)))
