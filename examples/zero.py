"""ZeRO: optimizer states, then parameters, sharded over the ranks: less memory, the same results.

The same small network is trained without sharding, with torch's ZeRO-1, with ZeRO-1 in two collectives and with
ZeRO-3, on groups of 1, 2, 4, ... ranks. The sizes are those between steps; "gathered" are the parameters that are whole
at one time in the forward of ZeRO-3.

    torchrun --nproc-per-node 2 zero.py --layers 6 --width 128
"""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dist_prims
from dist_prims.training.sharding import ShardedParameters


class FlatZero1:
    """ZeRO-1: each rank steps one part of the flat parameters, and stores the optimizer state of that part only.

    The optimizer must be elementwise, as SGD and Adam are, because it gets a part of a flat tensor.
    """

    def __init__(self, model: torch.nn.Module, optimizer_class: Any, group: Any = None, **options: Any) -> None:
        self.parameters, self.group = list(model.parameters()), group
        self.size = dist.get_world_size(group)
        self.flat = self.padded(self.parameters)
        dist.broadcast(self.flat, group=group, group_src=0)
        vector_to_parameters(self.flat, self.parameters)  # which are now views of the flat tensor
        self.shard = torch.nn.Parameter(self.flat.view(self.size, -1)[dist.get_rank(group)])  # of the same memory
        self.optim = optimizer_class([self.shard], **options)

    @torch.no_grad()
    def padded(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensors as one flat tensor, padded so that it has a shard of the same length for each rank."""
        flat = parameters_to_vector(tensors)
        return torch.nn.functional.pad(flat, (0, -len(flat) % self.size))

    def step(self) -> None:
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in self.parameters]
        means = self.padded(gradients) / self.size  # whose sum over the ranks is the mean
        for each in self.parameters:
            each.grad = None
        self.shard.grad = torch.empty_like(self.shard)
        dist_prims.reduce_scatter(self.shard.grad, means, group=self.group)
        self.optim.step()
        dist_prims.all_gather(self.flat, self.shard.detach(), group=self.group)


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
    held = sharded.parameters() if sharded else list(model.parameters())
    optimizer: Any = torch.optim.Adam(held, lr=1e-3)
    if form == "ZeRO-1, torch":
        optimizer = ZeroRedundancyOptimizer(held, torch.optim.Adam, process_group=group, lr=1e-3)
    elif form == "ZeRO-1, flat":
        optimizer = FlatZero1(model, torch.optim.Adam, group, lr=1e-3)
        held = [optimizer.shard]
    gathered = [0]
    for block in blocks if sharded else []:
        block[0].register_forward_hook(lambda *_: gathered.append(bytes_of(model.parameters())))
    draw = torch.Generator().manual_seed(group.rank())
    for _ in range(5):
        for each in held:
            each.grad = None
        x = torch.randn(8, width, generator=draw)
        (model(x) - x.roll(1, 1)).square().mean().backward()
        if form in ("plain", "ZeRO-1, torch"):
            dist_prims.average_gradients(model, group)
        optimizer.step()
    states = [value for each in getattr(optimizer, "optim", optimizer).state.values() for value in each.values()]
    weights = (sharded or model).state_dict().values()
    sizes = [bytes_of(held), bytes_of(each.grad for each in held), bytes_of(states), max(gathered)]
    return parameters_to_vector(weights), sizes


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
        forms = ("plain", "ZeRO-1, torch", "ZeRO-1, flat", "ZeRO-3")
        results = {form: train(form, group, arguments.layers, arguments.width) for form in forms}
        for form, (weights, sizes) in results.items():
            torch.testing.assert_close(weights, results["plain"][0], rtol=0, atol=1e-5)
            if rank == 0:
                held, gradients, states, gathered = (each / 1024 for each in sizes)
                row = f"{held:13.0f}{gradients:12.0f}{states:9.0f}{gathered:11.0f}{sum(sizes) / 1024:7.0f}"
                print(f"{form:17} {size:5}{row}")
    dist.barrier()


if __name__ == "__main__":
    main()
