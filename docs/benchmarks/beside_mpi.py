"""Compare calls of dist_prims between hosts with those of the MPI that started the ranks.

    DIST_PRIMS_TRANSPORT=tcp ./launch_scripts/netns-hosts.sh 2 1 none --mpirun -- \
        python docs/benchmarks/beside_mpi.py barrier broadcast:8 all_gather:64K

Each argument is a collective, or ``ping_pong`` between the first and the last rank, and the bytes of one rank's block.
Both libraries run in the same processes, in blocks of calls that take turns. A time is the median over the blocks, on
the slowest rank. Start it several times: where the system places two ranks of one machine differs from start to start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from mpi4py import MPI

import dist_prims
from dist_prims.bench.arguments import size

Calls = tuple[Callable[[], object], Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("cases", nargs="+", help="NAME or NAME:BYTES, such as all_reduce:8 or all_gather:64K")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--calls", type=int, default=100, help="in a block; a tenth for blocks of 256 KB and more")
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    dist_prims.init("dist_prims")
    for case in options.cases:
        name, _, text = case.partition(":")
        nbytes = size(text) if text else 0
        calls = options.calls if nbytes < 256 << 10 else max(1, options.calls // 10)
        pair = calls_of(name, max(1, nbytes // 4), world)
        times: tuple[list[float], list[float]] = ([], [])
        for block in range(-1, options.blocks):  # the first warms up
            for which in (0, 1) if block % 2 else (1, 0):
                took = timed(pair[which], calls, world)
                if block >= 0:
                    times[which].append(took)
        ours, theirs = (world.allreduce(statistics.median(each), MPI.MAX) for each in times)
        if world.rank == 0:
            print(json.dumps({"case": case, "dist_prims": ours, "mpi": theirs, "ratio": ours / theirs}), flush=True)
    dist.destroy_process_group()


def calls_of(name: str, count: int, world: MPI.Intracomm) -> Calls:
    """Return a call of dist_prims, and the same call of MPI, with blocks of ``count`` float32."""
    ranks, rank = world.size, world.rank
    block, result = torch.ones(count), torch.ones(count)
    blocks, results = torch.ones(count * ranks), torch.ones(count * ranks)
    theirs, their_result = block.clone().numpy(), result.clone().numpy()
    their_blocks, their_results = blocks.clone().numpy(), results.clone().numpy()

    def ping_pong(send: Callable[[int], object], receive: Callable[[int], object]) -> None:
        first, last = 0, ranks - 1
        if rank == first:
            send(last)
            receive(last)
        elif rank == last:
            receive(first)
            send(first)

    pairs: dict[str, Calls] = {
        "barrier": (dist_prims.barrier, world.Barrier),
        "broadcast": (lambda: dist_prims.broadcast(block, 0), lambda: world.Bcast(theirs, 0)),
        "all_reduce": (lambda: dist_prims.all_reduce(result), lambda: world.Allreduce(theirs, their_result)),
        "all_gather": (lambda: dist_prims.all_gather(blocks, block), lambda: world.Allgather(theirs, their_blocks)),
        "reduce_scatter": (
            lambda: dist_prims.reduce_scatter(block, blocks),
            lambda: world.Reduce_scatter_block(their_blocks, theirs),
        ),
        "all_to_all": (
            lambda: dist_prims.all_to_all(results, blocks),
            lambda: world.Alltoall(their_blocks, their_results),
        ),
        "ping_pong": (
            lambda: ping_pong(lambda to: dist.send(block, to), lambda source: dist.recv(result, source)),
            lambda: ping_pong(lambda to: world.Send(theirs, to), lambda source: world.Recv(their_result, source)),
        ),
    }
    if name not in pairs:
        raise SystemExit(f"'{name}' is none of {', '.join(pairs)}")
    return pairs[name]


def timed(call: Callable[[], object], calls: int, world: MPI.Intracomm) -> float:
    """Return the microseconds of a call, on average over ``calls`` of them."""
    world.Barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


if __name__ == "__main__":
    main()
