"""A stream of tar archives over ranks and workers: each sample once an epoch, also if other ranks continue the epoch.

Rank 0 writes archives of digits. Each rank reads a number of batches of its own with two workers; then rank 0 continues
alone, from the states of all ranks. Together they have the samples that one process reads.

    torchrun --nproc-per-node 2 stream.py --archives 5 --samples 40
"""

import argparse
import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dist_prims
from dist_prims.datasets import digits
from dist_prims.training import ShardedIterable

Sample = tuple[str, int, float]  # name, label, mean of the pixels


def write(path: str, first: int, count: int) -> None:
    """Write two files for each sample: its image and its label."""
    data = digits()
    with tarfile.open(path, "w") as archive:
        for number in range(first, first + count):
            image, label = data[number % len(data)]
            for field, content in (("pixels", image.numpy().tobytes()), ("label", str(int(label)).encode())):
                member = tarfile.TarInfo(f"digits/{number:06}.{field}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def members(path: str) -> Iterator[tuple[str, str, bytes]]:
    """Name without suffix, suffix and content of each file of an archive.

    ``tarfile`` takes a damaged header and the end of a truncated archive for the end mark, and samples would be lost
    without an error. The end mark is therefore checked here.
    """
    with tarfile.open(path) as archive:
        for member in archive:
            if file := archive.extractfile(member):  # None for a directory
                yield *os.path.splitext(member.name), file.read()
        assert archive.fileobj is not None
        archive.fileobj.seek(archive.offset)
        if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"{path} is damaged, or it ends early after {len(archive.getmembers())} members")


def read(path: str) -> Iterator[Sample]:
    """The samples of an archive: consecutive files with the same name."""
    for name, files in groupby(members(path), key=lambda member: member[0]):
        fields = {suffix: content for _, suffix, content in files}
        pixels = torch.frombuffer(bytearray(fields[".pixels"]), dtype=torch.float32)
        yield name, int(fields[".label"]), pixels.mean().item()


def check_that_damage_is_found(path: str) -> None:
    whole = Path(path).read_bytes()
    cut = Path(path).with_suffix(".cut")
    for size in range(0, len(list(members(path))) * 2 * tarfile.BLOCKSIZE, 2000):
        cut.write_bytes(whole[:size])
        try:
            samples = list(read(str(cut)))
        except tarfile.ReadError:
            continue
        raise AssertionError(f"{len(samples)} samples of {size} bytes, without an error")


def read_in_parts(paths: list[str]) -> tuple[list[Sample], list[Sample]]:
    """The samples that all ranks have read in the first part of an epoch, and those that rank 0 has read then."""
    stream = ShardedIterable(paths, read, workers=2, window=16, seed=1)
    batches = islice(stream.batches(4, list), 2 + dist.get_rank())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (list(chain.from_iterable(batches)), stream.state_dict()))
    alone, _ = dist.new_subgroups(1)
    rest = ShardedIterable(paths, read, group=alone, workers=1, window=16, seed=1)
    rest.load_state_dict([state for _, state in parts])
    return [sample for samples, _ in parts for sample in samples], list(chain.from_iterable(rest.batches(8, list)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--archives", type=int, default=5)
    parser.add_argument("--samples", type=int, default=40, help="in each archive")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    with tempfile.TemporaryDirectory() as own_folder:
        folders = [own_folder]
        dist.broadcast_object_list(folders)
        paths = [os.path.join(folders[0], f"{number}.tar") for number in range(arguments.archives)]
        if dist.get_rank() == 0:
            for number, path in enumerate(paths):
                write(path, number * arguments.samples, arguments.samples)
            check_that_damage_is_found(paths[0])
        dist.barrier()
        before, after = read_in_parts(paths)
        assert sorted(before + after) == list(chain.from_iterable(map(read, paths))), "not each sample once"
        dist.barrier()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks have read {len(before)} samples, and one of them the other {len(after)}:")
        print("each of the samples that one process reads, once")


if __name__ == "__main__":
    main()
