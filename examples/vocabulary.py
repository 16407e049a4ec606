"""Cross-entropy over a split vocabulary: PyTorch's loss_parallel, with the last layer split by words.

Losses and gradients equal those of one process, whether a rank has all rows of its logits or a chunk of rows at a time.
``losses_and_gradient`` is the same without DTensor: two all_reduces, and no overflow for logits such as 1000.

    torchrun --nproc-per-node 2 vocabulary.py --words 2003
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import dist_prims

FEATURES, ROWS, CHUNK = 16, 256, 32


class LargestTensor(TorchFunctionMode):
    """Records the number of elements of the largest tensor that torch returns on this rank."""

    elements = 0

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        local = result.to_local() if isinstance(result, DTensor) else result
        self.elements = max(self.elements, local.numel() if isinstance(local, torch.Tensor) else 0)
        return result


def last_layer(words: int, split: bool) -> nn.Module:
    """The layer from features to logits; with ``split`` a rank has the weights and biases of its own words."""
    torch.manual_seed(2)
    layer = nn.Linear(FEATURES, words)
    by_words = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(layer, init_device_mesh("cpu", (dist.get_world_size(),)), by_words) if split else layer


def whole(tensor: Any) -> torch.Tensor:
    """All words of a tensor, on every rank."""
    result: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return result.detach()


def backward(layer: nn.Module, hidden: torch.Tensor, targets: torch.Tensor, chunk: int) -> torch.Tensor:
    """The mean loss. The logits of a chunk of rows are freed before those of the next chunk are computed."""
    rows, loss = hidden.detach().requires_grad_(), torch.zeros(())
    for some, words in zip(rows.split(chunk), targets.split(chunk), strict=True):
        with loss_parallel():  # has no effect on the logits of a whole layer
            part = F.cross_entropy(layer(some), words, reduction="sum") / len(rows)
            part.backward()
        loss += whole(part)
    hidden.backward(rows.grad)  # on into the layers that computed the rows
    return loss


def measure(words: int, split: bool, chunk: int = ROWS) -> tuple[list[torch.Tensor], int]:
    """The loss with the gradients of the rows, the weights and the biases, and the size of the largest tensor."""
    layer = last_layer(words, split)
    torch.manual_seed(0)
    hidden, targets = torch.randn(ROWS, FEATURES, requires_grad=True), torch.randint(words, (ROWS,))
    with LargestTensor() as largest:
        loss = backward(layer, hidden, targets, chunk)
    return [loss, *(whole(leaf.grad) for leaf in (hidden, *layer.parameters()))], largest.elements


def losses_and_gradient(logits: torch.Tensor, targets: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row, and the gradient of their sum; ``logits`` (rows, words of this rank, from ``first`` on)."""
    largest = logits.amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    shifted = logits - largest[:, None]  # at most 0, so that exp() does not overflow
    own = (targets >= first) & (targets < first + logits.shape[1])
    place = torch.where(own, targets - first, 0)[:, None]
    of_target = torch.where(own, shifted.gather(1, place)[:, 0], 0)
    exponents = shifted.exp_()
    sums = torch.stack([exponents.sum(1), of_target])
    dist.all_reduce(sums)
    gradient = exponents.div_(sums[0, :, None]).scatter_add_(1, place, -own[:, None].to(logits.dtype))
    return sums[0].log() - sums[1], gradient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--words", type=int, default=2003, help="size of the vocabulary")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    rank, size, words = dist.get_rank(), dist.get_world_size(), arguments.words
    log = print if rank == 0 else lambda text: None
    log(f"{words} words over {size} ranks, {ROWS} rows of {FEATURES} features, chunks of {CHUNK} rows\n")
    log("logits                           loss   largest error   elements of the largest tensor")
    expected, elements = measure(words, split=False)
    log(f"one process, whole logits  {expected[0]:10.6f} {elements:47,}")
    for name, chunk in {"split by words": ROWS, "split, by chunks": CHUNK}.items():
        found, elements = measure(words, True, chunk)
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
        error = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
        log(f"{name:26} {found[0]:10.6f} {error:15.0e} {elements:31,}")
    limit = max(max(CHUNK, FEATURES) * -(-words // size), ROWS * FEATURES)
    assert elements <= limit, f"by chunks a tensor has {elements} elements, more than {limit}"

    logits = torch.tensor([[1000.0, 0.0] * size, [1000.0, 1000.0] * size], requires_grad=True)
    losses = F.cross_entropy(logits, torch.tensor([1, 0]), reduction="none")
    part = torch.autograd.grad(losses.sum(), logits)[0][:, 2 * rank : 2 * rank + 2]
    mine = losses_and_gradient(logits.detach()[:, 2 * rank : 2 * rank + 2], torch.tensor([1, 0]), first=2 * rank)
    torch.testing.assert_close(mine, (losses.detach(), part))
    log(f"\nlogits of 1000, without DTensor: losses {mine[0].tolist()}, as in one process")


if __name__ == "__main__":
    main()
