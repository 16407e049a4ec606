"""An all_reduce between four hosts of which one has a slow link: the schedule found, beside ring and hierarchical.

    ./launch_scripts/netns-hosts.sh 4 2 "100mbit 1gbit" -- python docs/benchmarks/slow_host.py

Each rank finds the same schedule. The contenders take turns, in a group of dist_prims each; it prints the median of
each, divided by the bound: the seconds in which the data leaves and enters the host with the slow link once.
"""

from __future__ import annotations

import argparse

import torch.distributed as dist

import dist_prims
from dist_prims import BackendOptions
from dist_prims.bench.measure import measure
from dist_prims.schedules import Graph, algorithm, synthesize
from dist_prims.units import format_bytes, format_duration, parse_bytes

BANDWIDTHS = (12.5e6, 125e6, 125e6, 125e6)  # bytes a second of the links


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=parse_bytes, default="16M")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    hosts = dist_prims.init("gloo", timeout=600).hosts
    # 1. The latencies are those that bench calibrate finds between such hosts and within them.
    graph = Graph.hosts([*map(len, hosts)], BANDWIDTHS, 100e-6, 20e-6, 2e9)
    result = synthesize(graph, "all_reduce", given.bytes, chunks=4)
    found = result.found
    algorithm("all_reduce", name="found", chunks=found.schedule.chunks)(lambda size: iter(found.schedule.steps))
    # 2. A group for each contender; one follows the registered algorithm of the lowest price.
    names = ["ring", "ring x8", "hierarchical", "hierarchical x8", result.registered.name, f"found x{found.segments}"]
    groups = {name: dist.new_group(backend="dist_prims", pg_options=BackendOptions(all_reduce=name)) for name in names}
    lines = measure("all_reduce", given.bytes, [], iterations=given.rounds, warmup=1, groups=groups)
    # 3. The table.
    if dist.get_rank() == 0:
        bound = result.bound
        assert bound is not None, "the bound needs networkx"
        print(f"{format_bytes(given.bytes)}, {graph.ranks} ranks on {len(hosts)} hosts, bound {format_duration(bound)}")
        for priced in (found, result.registered):
            print(f"price of {priced.name}: {format_duration(priced.seconds)}")
        print("\n| algorithm | median | fastest | slowest | median / bound | wrong |")
        print("| --- | --- | --- | --- | --- | --- |")
        for line in lines:
            times = (format_duration(each) for each in (line.median, min(line.seconds), max(line.seconds)))
            print(f"| {line.contender} | {' | '.join(times)} | {line.median / bound:.2f} | {line.wrong} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
