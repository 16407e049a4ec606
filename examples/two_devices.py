"""Two devices: a model cut over two devices of each rank, with data parallelism over the ranks.

The first layer is on one device, the second on another: two GPUs for each rank if there are enough, otherwise the CPU
twice, which shows the code but no speedup. DistributedDataParallel accepts such a model with ``device_ids=None``.

    torchrun --nproc-per-node 2 two_devices.py --steps 10
"""

import argparse
import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import dist_prims
from dist_prims.training import DevicePipeline

BATCH, RATE = 12, 0.1

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class TwoDevices(torch.nn.Module):
    """Two linear layers, each on its own device; ``forward`` moves the activations between them."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.devices = first, second
        self.net1, self.net2 = torch.nn.Linear(10, 10).to(first), torch.nn.Linear(10, 5).to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.net1(x.to(self.devices[0])))
        y: torch.Tensor = self.net2(hidden.to(self.devices[1]))
        return y


def step_of(model: torch.nn.Module) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x)
        loss = F.mse_loss(output, y.to(output.device))
        loss.backward()
        return loss.detach()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    enough = torch.cuda.device_count() >= 2 * size
    first, second = (torch.device("cuda", 2 * rank + each) if enough else torch.device("cpu") for each in (0, 1))
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    plain, cut = TwoDevices(cpu, cpu), TwoDevices(first, second)
    cut.load_state_dict(plain.state_dict())
    stages = [torch.nn.Sequential(copy.deepcopy(cut.net1), torch.nn.ReLU()), copy.deepcopy(cut.net2)]
    pipeline = DevicePipeline(stages, num_microbatches=2, devices=[first, second], loss=F.mse_loss)
    piped, parallel = torch.nn.ModuleList(stages), copy.deepcopy(cut)
    dist_prims.GradientAverager(piped)
    shared = DistributedDataParallel(parallel, device_ids=None)
    forms: dict[str, tuple[torch.nn.Module, Step, bool]] = {  # and whether it gets only this rank's data
        "one device, one process": (plain, step_of(plain), False),
        "two devices": (cut, step_of(cut), False),
        "two devices and DDP": (parallel, step_of(shared), True),
        "two devices, pipelined, averaged": (piped, pipeline.step, True),
    }
    optimizers = {name: torch.optim.SGD(form[0].parameters(), lr=RATE) for name, form in forms.items()}
    for _ in range(arguments.steps):
        x = torch.randn(size * BATCH, 10)  # the same on every rank
        y = x[:, :5] - x[:, 5:]
        own = slice(rank * BATCH, (rank + 1) * BATCH)
        for name, (_, step, is_part) in forms.items():
            optimizers[name].zero_grad()
            step(x[own], y[own]) if is_part else step(x, y)
            optimizers[name].step()

    expected = parameters_to_vector(plain.parameters()).detach()
    if rank == 0:
        print(f"devices: {first}, {second}        difference from one process after {arguments.steps} steps")
    for name, (model, _, _) in forms.items():
        error = (parameters_to_vector([each.cpu() for each in model.parameters()]) - expected).abs().max().item()
        assert error <= 1e-6, f"{name}: {error:.0e} from one process on one device"
        if rank == 0:
            print(f"{name:32} {error:.0e}")


if __name__ == "__main__":
    main()
