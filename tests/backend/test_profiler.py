"""The events of collectives in torch.profiler and in the execution trace: names, sizes, dtype, group and ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import span
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

import dist_prims
from dist_prims.torch_compat import all_gather_single, reduce_scatter_single

EVENT = "record_param_comms"


def call_each(rank: int) -> None:
    """Every collective on 2 ranks, with 4 elements where the collective allows it."""
    world = dist.group.WORLD
    four, two = torch.ones(4), torch.ones(2)
    other = 1 - rank
    dist.all_reduce(four)
    dist.all_reduce(torch.ones(4, dtype=torch.int64), async_op=True).wait()
    world.allreduce_coalesced([four, two]).wait()
    dist.broadcast(four, 1)
    dist.reduce(four, 1)
    dist.all_gather([torch.ones(4), torch.ones(4)], four)
    all_gather_single(torch.ones(8), four)
    world.allgather_coalesced([[torch.ones(4), torch.ones(2)] for _ in range(2)], [four, two]).wait()
    world.allgather_into_tensor_coalesced([torch.ones(8), torch.ones(4)], [four, two]).wait()
    dist.gather(four, [torch.ones(4), torch.ones(4)] if rank == 1 else None, 1)
    dist.scatter(four, [torch.ones(4), torch.ones(4)] if rank == 1 else None, 1)
    dist.reduce_scatter(two, [torch.ones(2), torch.ones(2)])
    reduce_scatter_single(two, four)
    world.reduce_scatter_tensor_coalesced([two, torch.ones(1)], [four, torch.ones(2)]).wait()
    dist.all_to_all_single(torch.ones(4), four)
    dist.all_to_all_single(torch.ones(4), four, [2, 2], [2, 2])
    dist.all_to_all([torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(2)])
    dist.barrier()
    if rank == 0:
        dist.send(four, other)
    else:
        dist.recv(four, other)


# The calls above: name, elements that go in, elements that come out, dtype, rank (the root; None: this rank).
CALLS: list[tuple[str, int, int, str, int | None]] = [
    ("allreduce", 4, 4, "Float", None),
    ("allreduce", 4, 4, "Long", None),
    ("allreduce_coalesced", 6, 6, "Float", None),
    ("broadcast", 4, 4, "Float", 1),
    ("reduce", 4, 4, "Float", 1),
    ("all_gather", 4, 8, "Float", None),
    ("_allgather_base", 4, 8, "Float", None),
    ("allgather_coalesced", 6, 12, "Float", None),
    ("allgather_into_tensor_coalesced", 6, 12, "Float", None),
    ("gather", 4, 8, "Float", 1),
    ("scatter", 8, 4, "Float", 1),
    ("reduce_scatter", 4, 2, "Float", None),
    ("_reduce_scatter_base", 4, 2, "Float", None),
    ("reduce_scatter_tensor_coalesced", 6, 3, "Float", None),
    ("all_to_all", 4, 4, "Float", None),
    ("all_to_allv", 4, 4, "Float", None),
    ("all_to_all", 4, 4, "Float", None),
    ("barrier", 0, 0, "Byte", None),
]


def traces_of(folder: Path, call: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events of this rank in the profiler's trace, and its nodes in the execution trace."""
    place = folder / str(dist.get_rank())
    observer = ExecutionTraceObserver().register_callback(f"{place}.nodes.json")
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, execution_trace_observer=observer) as profiled:
        call()
    profiled.export_chrome_trace(f"{place}.json")
    events = json.loads(Path(f"{place}.json").read_text())["traceEvents"]
    nodes = json.loads(Path(f"{place}.nodes.json").read_text())["nodes"]
    found = sorted((event for event in events if event["name"] == EVENT), key=lambda event: event["ts"])
    return found, [node for node in nodes if node["name"] == EVENT]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_each_collective_has_its_event(tmp_path: Path) -> None:
    def body() -> None:
        rank = dist.get_rank()
        events, nodes = traces_of(tmp_path, lambda: call_each(rank))
        other = 1 - rank
        message = ("send" if rank == 0 else "recv", 4, 4, "Float", other)
        wanted = [(*call[:4], rank if call[4] is None else call[4]) for call in [*CALLS, message]]
        fields = ("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Rank")
        assert [tuple(event["args"][field] for field in fields) for event in events] == wanted
        for event in events:
            args = event["args"]
            assert args["Group size"] == 2
            assert json.loads(args["Process Group Ranks"]) == [0, 1]
            assert args["Process Group Name"] == dist.group.WORLD.group_name
            assert args["Process Group Description"] == "default_pg"
        assert events[-1]["args"]["Dst Rank" if rank == 0 else "Src Rank"] == other
        assert [event["args"].get("Is asynchronized op") for event in events[:2]] in ([0, 1], [None, None])
        numbers = [event["args"]["Seq"] for event in events[:-1] if "Seq" in event["args"]]
        assert numbers == sorted(set(numbers))
        # tensors, sequence, group, rank, name, splits in and out, first global rank, stride, size, async
        values = [node["inputs"]["values"] for node in nodes]
        assert [(value[4], value[3]) for value in values] == [(call[0], call[4]) for call in wanted]
        # A call of two tensors takes two numbers, and has the first one; messages are counted by themselves.
        tensors = [2 if "coalesced" in name else 1 for name, *_ in CALLS]
        assert [value[1] for value in values] == [[sum(tensors[:each]) + 1, False] for each in range(len(CALLS))] + [
            [1, True]
        ]
        for value, node in zip(values, nodes, strict=True):
            assert value[2] == [dist.group.WORLD.group_name, "default_pg"]
            assert value[7:10] == [0, 1, 2]
            assert len(node["outputs"]["values"]) == 1
        assert sum(shape[0] for shape in nodes[2]["inputs"]["shapes"][0]) == 6  # those of allreduce_coalesced
        assert values[15][4:7] == ["all_to_allv", [2, 2], [2, 2]]

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_the_direct_calls_have_events_too(tmp_path: Path) -> None:
    def body() -> None:
        shared = dist_prims.empty(3).fill_(1)

        def calls() -> None:
            dist_prims.all_reduce(torch.ones(4))
            dist_prims.all_reduce(shared)
            dist_prims.all_reduce(torch.ones(5), algorithm="ring")
            dist.all_reduce(torch.eye(2).to_sparse())
            # Rank 0 has no input of the broadcast, and no output of the reduce: both had the size of a gather once.
            dist_prims.broadcast(torch.ones(6), 1, algorithm="binomial")
            dist_prims.reduce(torch.ones(7), 1)

        events, _ = traces_of(tmp_path, calls)
        fields = ("Collective name", "In msg nelems", "Out msg nelems")
        found = [tuple(event["args"][field] for field in fields) for event in events]
        names = ("allreduce", "allreduce", "allreduce", "allreduce_sparse", "broadcast", "reduce")
        assert found == [(name, count, count) for name, count in zip(names, (4, 3, 5, 4, 6, 7), strict=True)]

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_the_ranks_of_a_group(tmp_path: Path) -> None:
    def body() -> None:
        spaced, uneven = dist.new_group([0, 2]), dist.new_group([0, 1, 3])

        def calls() -> None:
            for group in (spaced, uneven):
                if dist.get_rank(group) >= 0:
                    dist.all_reduce(torch.ones(1), group=group)

        events, _ = traces_of(tmp_path, calls)
        ranks = [json.loads(event["args"].get("Process Group Ranks", "[]")) for event in events]
        # an uneven list is not a range of ranks: it is in the header of the trace, as for NCCL
        assert ranks == [[[0, 2], []], [[]], [[0, 2]], [[]]][dist.get_rank()]
        if dist.get_rank() == 1:
            configuration = json.loads((tmp_path / "1.json").read_text())["distributedInfo"]["pg_config"]
            assert [group["ranks"] for group in configuration] == [[0, 1, 2, 3], [0, 1, 3]]

    dist_prims.spawn(body, 4, backend="dist_prims", timeout=60)


def test_a_group_that_spans_hosts_has_one_event_for_each_call(tmp_path: Path) -> None:
    def body() -> None:
        def calls() -> None:
            dist.all_reduce(torch.ones(100_000))
            dist.all_gather([torch.ones(3) for _ in range(3)], torch.ones(3))
            if dist.get_rank() == 0:
                dist.send(torch.ones(2), 2)
            if dist.get_rank() == 2:
                dist.recv(torch.ones(2), 0)

        events, _ = traces_of(tmp_path, calls)
        message = {0: ["send"], 1: [], 2: ["recv"]}[dist.get_rank()]
        assert [event["args"]["Collective name"] for event in events] == ["allreduce", "all_gather", *message]

    span("a a b", body)
