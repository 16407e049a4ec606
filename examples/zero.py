"""ZeRO: optimizer states, then parameters, sharded over the ranks: less memory, the same results.

The same small network is trained without sharding, with ZeRO-1 and with ZeRO-3, on groups of 1, 2, 4, ... ranks. The
sizes are those between steps; "gathered" are the parameters that ZeRO-3 gathers while a layer computes, at most.

    torchrun --nproc-per-node 2 zero.py --layers 6 --width 128
"""

import argparse
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector

import dist_prims
from dist_prims.training.sharding import ShardedParameters, ZeroOptimizer

STEPS = 5


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """The bytes of the tensors' storages, each storage counted once."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors if each is not None}
    return sum(storage.nbytes() for storage in storages.values())


def train(form: str, group: dist.ProcessGroup, layers: int, width: int) -> tuple[torch.Tensor, list[int]]:
    """The final weights, and the bytes of parameters, gradients, states, and of gathered parameters."""
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(layers)]
    model = torch.nn.Sequential(*blocks)
    sharded = ShardedParameters(model, group=group) if form == "ZeRO-3" else None
    optimizer: torch.optim.Optimizer
    if form == "ZeRO-1":
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.Adam, group=group, lr=1e-3)
    else:
        optimizer = torch.optim.Adam(sharded.parameters() if sharded else model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(group.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, width, generator=draw)
        (model(x) - x.roll(1, 1)).square().mean().backward()
        if form == "plain":
            dist_prims.average_gradients(model, group)
        optimizer.step()
    held = [*(sharded.parameters() if sharded else model.parameters())]
    states = [value for each in optimizer.state.values() for value in each.values()]
    gathered = sharded.peak_bytes if sharded else 0
    weights = sharded.state_dict() if sharded else model.state_dict()
    sizes = [bytes_of(held), bytes_of(each.grad for each in held), bytes_of(states), gathered]
    return parameters_to_vector(weights.values()), sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128, help="inputs and outputs of each layer")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print("KB on each rank   ranks   parameters   gradients   states   gathered    sum")
    for size in sorted({each for each in (1, 2, 4, world) if each <= world}):
        group = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        results = {
            form: train(form, group, arguments.layers, arguments.width) for form in ("plain", "ZeRO-1", "ZeRO-3")
        }
        for form, (weights, sizes) in results.items():
            torch.testing.assert_close(weights, results["plain"][0], rtol=0, atol=1e-5)
            if rank == 0:
                held, gradients, states, gathered = (each / 1024 for each in sizes)
                row = f"{held:13.0f}{gradients:12.0f}{states:9.0f}{gathered:11.0f}{sum(sizes) / 1024:7.0f}"
                print(f"{form:17} {size:5}{row}")
    dist.barrier()


if __name__ == "__main__":
    main()
