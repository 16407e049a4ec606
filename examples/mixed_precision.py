"""Mixed precision: a chessboard learnt in float16, with one overflow decision for all ranks.

A small network learns the colour of each point of a board from its coordinates; each rank has a part of the points.
Computed and sent in 16 bits it learns as in float32. Then each rank trains an expert that no other rank has, and rank
0 overflows: with torch's scaler only rank 0 skips the step, with the scaler of dist_prims all ranks skip it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from .._console import Console
from ..training import GradientAverager
from ..training.compression import Half
from ..training.mixed_precision import GradScaler

__all__: list[str] = []

SIDE, SQUARES, STEPS = 16, 4, 120


def run(console: Console) -> None:
    threads, size = torch.get_num_threads(), dist.get_world_size()
    torch.set_num_threads(1)  # so small a network is slower with several threads
    alone = fit(torch.float32, alone=True)
    rows, fits = [("float32, one process", "", *cells(alone))], []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        fits.append(fit(dtype))
        rows.append((f"{str(dtype)[6:]}, ranks: {size}", f"{dtype.itemsize * 8}", *cells(fits[-1])))
    torch.set_num_threads(threads)
    console.table(("computed in", "bits sent", "loss first", "loss last", "points right", "scale"), rows)
    near = torch.allclose(fits[0][0][:10], alone[0][:10], rtol=1e-3)
    console.check(near, "in float32 the first 10 losses equal one process's, within 0.1 %")
    console.check(min(right for _, right, _ in fits) > 0.95, "with 16 and with 32 bits more than 95 % are right")
    console.check(rounded_twice_only(), "gradients in bfloat16 are added in float32: the mean is rounded once")
    theirs, ours = experts(torch.amp.GradScaler("cpu", init_scale=8.0)), experts(GradScaler("cpu", init_scale=8.0))
    console.table(("scaler", "steps of 3, by rank", "scale, by rank"), [("torch", *theirs), ("dist_prims", *ours)])
    console.check(set(ours[0].split()) == {"2"}, "dist_prims: all ranks skip the step in which one overflows")


def cells(found: tuple[torch.Tensor, float, float]) -> tuple[str, ...]:
    losses, right, scale = found
    return f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{right:.0%}", f"{scale:g}"


def board() -> tuple[torch.Tensor, torch.Tensor]:
    """The coordinates of every point, and the colour of its square."""
    line = torch.arange(SIDE)
    points = torch.cartesian_prod(line, line)
    colours = (points // (SIDE // SQUARES)).sum(1, keepdim=True) % 2
    return 8 * points / SIDE - 4, colours.float()


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*block(2), *block(48), *block(48), torch.nn.Linear(48, 1))


def block(into: int) -> tuple[torch.nn.Module, ...]:
    return torch.nn.Linear(into, 48), torch.nn.LayerNorm(48), torch.nn.ReLU()


def fit(dtype: torch.dtype, alone: bool = False) -> tuple[torch.Tensor, float, float]:
    """The loss over all points in each step, the fraction of points coloured right, and the scale."""
    x, y = board()
    rank, size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    mine, weight = slice(rank, None, size), size * len(y[rank::size]) / len(y)
    model, is_half = network(), dtype != torch.float32
    if not alone:
        GradientAverager(model, compress=Half(dtype) if is_half else None)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=5e-3), []
    scaler = GradScaler("cpu", enabled=dtype == torch.float16)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=is_half):
            out = model(x[mine])
        loss = mse_loss(out.float(), y[mine]) * weight
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach() / size)
    whole = torch.stack(losses)
    if not alone:
        dist.all_reduce(whole)
    with torch.no_grad():
        right = ((model(x) > 0.5) == (y > 0.5)).float().mean()
    return whole, right.item(), scaler.get_scale()


def rounded_twice_only() -> bool:
    """Whether each gradient is rounded when it is sent, the mean when it returns, and nothing in between."""
    size = dist.get_world_size()
    gradients = torch.randn(size, 1000, generator=torch.Generator().manual_seed(1))
    weight = torch.nn.ParameterList([torch.zeros(1000)])
    GradientAverager(weight, compress=Half(torch.bfloat16, feedback=False))
    (weight[0] * gradients[dist.get_rank()]).sum().backward()
    arrived = gradients.bfloat16().float() if size > 1 else gradients
    mean = sum(arrived[1:], arrived[0].clone()).div_(size)  # in the order of the ranks
    return torch.equal(weight[0].grad, mean.bfloat16().float() if size > 1 else mean)


def experts(scaler: torch.amp.GradScaler) -> tuple[str, str]:
    """Train a part of the model that only this rank has for three steps; steps made and scale of every rank."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for step in range(3):
        optimizer.zero_grad()
        overflow = float("inf") if step == 1 and dist.get_rank() == 0 else 1.0
        torch.autograd.backward(scaler.scale(-overflow * weight.sum()))
        scaler.step(optimizer)
        scaler.update()
    found = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([weight.item(), scaler.get_scale()]))
    steps, scales = zip(*(each.tolist() for each in found), strict=True)
    return " ".join(f"{each:g}" for each in steps), " ".join(f"{each:g}" for each in scales)
