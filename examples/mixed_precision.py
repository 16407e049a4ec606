"""Mixed precision: a chessboard learnt in float16, with one overflow decision for all ranks.

A small network learns the colour of each point of a board from its coordinates; each rank has a part of the points.
Computed and sent in 16 bits it learns as in float32. Then each rank trains an expert that no other rank has, and rank
0 overflows: with torch's scaler only rank 0 skips the step, with ``unscale`` of dist_prims all ranks skip it.

    torchrun --nproc-per-node 2 mixed_precision.py --steps 120
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

import dist_prims
from dist_prims.training.compression import Half
from dist_prims.training.mixed_precision import unscale

SIDE, SQUARES = 16, 4


def board() -> tuple[torch.Tensor, torch.Tensor]:
    """The coordinates of every point, and the colour of its square."""
    points = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))
    colours = (points // (SIDE // SQUARES)).sum(1, keepdim=True) % 2
    return 8 * points / SIDE - 4, colours.float()


def network() -> torch.nn.Sequential:
    def block(inputs: int) -> tuple[torch.nn.Module, ...]:
        return torch.nn.Linear(inputs, 48), torch.nn.LayerNorm(48), torch.nn.ReLU()

    torch.manual_seed(0)
    return torch.nn.Sequential(*block(2), *block(48), *block(48), torch.nn.Linear(48, 1))


def fit(dtype: torch.dtype, steps: int, alone: bool = False) -> tuple[torch.Tensor, float, float]:
    """The loss over all points in each step, the fraction of points coloured right, and the scale."""
    x, y = board()
    rank, size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    own, weight = slice(rank, None, size), size * len(y[rank::size]) / len(y)
    model, is_half = network(), dtype != torch.float32
    if not alone:
        dist_prims.GradientAverager(model, compress=Half(dtype) if is_half else None)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=5e-3), []
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=is_half):
            out = model(x[own])
        loss = mse_loss(out.float(), y[own]) * weight
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach() / size)
    whole = torch.stack(losses)
    if not alone:
        dist.all_reduce(whole)
    with torch.no_grad():
        right = ((model(x) > 0.5) == (y > 0.5)).float().mean()
    return whole, right.item(), scaler.get_scale()


def check_rounding() -> None:
    """Each gradient is rounded to bfloat16 when it is sent, and the mean when it returns; between, nothing is."""
    size = dist.get_world_size()
    gradients = torch.randn(size, 1000, generator=torch.Generator().manual_seed(1))
    weight = torch.nn.ParameterList([torch.zeros(1000)])
    dist_prims.GradientAverager(weight, compress=Half(torch.bfloat16, feedback=False))
    (weight[0] * gradients[dist.get_rank()]).sum().backward()
    if size > 1:  # one rank sends nothing and rounds nothing
        sent = gradients.bfloat16().float()
        gradients = sum(sent[1:], sent[0].clone()).div_(size).bfloat16().float()  # in the order of the ranks
    torch.testing.assert_close(weight[0].grad, gradients.view(-1), rtol=0, atol=0)


def train_experts(agree: bool) -> torch.Tensor:
    """Train a part of the model that only this rank has for three steps; steps made and scale of every rank."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        overflow = float("inf") if step == 1 and dist.get_rank() == 0 else 1.0
        scaler.scale(-overflow * weight.sum()).backward()
        if agree:
            unscale(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
    found = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([weight.item(), scaler.get_scale()]))
    return torch.stack(found).t()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    log = print if dist.get_rank() == 0 else lambda text: None
    fits = {"float32, one process": fit(torch.float32, arguments.steps, alone=True)}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        fits[f"{str(dtype)[6:]}, all ranks"] = fit(dtype, arguments.steps)
    log("computed and sent in    first loss   last loss   points right    scale")
    for name, (losses, right, scale) in fits.items():
        log(f"{name:22} {losses[0]:11.4f} {losses[-1]:11.4f} {right:14.0%} {scale:8g}")
        assert right > 0.95 or arguments.steps < 120, f"{name}: only {right:.0%} of the points are right"
    first = [fits[f"float32, {name}"][0][:10] for name in ("all ranks", "one process")]
    torch.testing.assert_close(*first, rtol=1e-3, atol=0)
    check_rounding()
    log("\nrank 0 overflows in step 1 of 3   steps of each rank     scale of each rank")
    for name, agree in (("GradScaler", False), ("unscale, GradScaler", True)):
        steps, scales = train_experts(agree).tolist()
        log(f"{name:33} {' '.join(f'{each:g}' for each in steps):22} {' '.join(f'{each:g}' for each in scales)}")
    assert set(steps) == {2.0}, "a rank has made a step that another has skipped"


if __name__ == "__main__":
    main()
