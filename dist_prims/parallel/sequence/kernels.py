"""One block of attention: some queries against some of the keys.

A block has an output, and *logs*: for each query the logarithm of its softmax's denominator, which ranges over the keys
of the block. With the logs, blocks that were computed apart can be merged. The gradient of a block needs nothing of the
other blocks but the merged output and logs: p = exp(score - log) is then the share of a key in the whole softmax.
``scaled_dot_product_attention`` does not return the logs, so the flash kernel behind it is called directly.

Where ``scaled_dot_product_attention`` would take its math kernel, which computes half types in float32, the flash
kernel computes them in float64, see ``prepared``. In the gradient of a score, share * (gradient - sum(grad * output)),
the two terms are nearly equal where one key has almost all of the share: the error of an output that was rounded to a
half type would not cancel, and float32 would leave more of it than the math kernel does.

Queries are (rows, heads, tokens, features), keys and values (rows, 1, tokens, features): a row has the heads of queries
that share a head of keys. Keys are not repeated for them, but have stride 0 in that dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from ...torch_compat import chosen_attention, flash_attention, flash_attention_backward

__all__: list[str] = []

Tensors = tuple[Tensor, Tensor, Tensor]


def prepared(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensors:
    """The tensors in the form that the flash kernel takes: features side by side, and equally many in all three.

    Zeros are added as further features, which change nothing. The dtype of the returned q is the dtype of the
    computation.
    """
    one_q, one_k, one_v = (x[:1, :1, :1].detach().contiguous() for x in (q, k, v))  # for the choice of the kernel
    if one_q.numel() and chosen_attention(one_q, one_k, one_v, causal=causal) != SDPBackend.FLASH_ATTENTION:
        width = max(q.shape[3], v.shape[3])
        q, k, v = (F.pad(x, (0, width - x.shape[3])) for x in (q, k, v))
        q = q if wide(q) == q.dtype else q.to(torch.float64)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The output and the logs of a block, in the dtype of q."""
    k, v = (x.to(q.dtype).expand(-1, q.shape[1], -1, -1) for x in (k, v))
    output, logs = flash_attention(q, k, v, causal, scale)
    return output, logs


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, logs: Tensor, causal: bool, scale: float
) -> Tensors:
    """The gradients of q, k and v of one block.

    ``grad`` is the gradient of the output; ``output`` and ``logs`` are merged from the blocks of all keys.
    """
    k, v = (x.to(q.dtype).expand(-1, q.shape[1], -1, -1) for x in (k, v))
    grad_q, grad_k, grad_v = flash_attention_backward(grad, q, k, v, output, logs, causal=causal, scale=scale)
    if q.shape[1] > 1:  # several heads of queries share the head of keys
        grad_k, grad_v = grad_k.sum(1, keepdim=True), grad_v.sum(1, keepdim=True)
    return grad_q, grad_k, grad_v


def merge(output: Tensor, logs: Tensor, block: Tensor, block_logs: Tensor) -> None:
    """Merge a block into ``output`` and ``logs``, in place; logs of -inf mean that nothing was merged yet.

    >>> output, logs = torch.zeros(1, 2), torch.full((1,), -torch.inf)
    >>> merge(output, logs, torch.tensor([[1.0, 3.0]]), torch.zeros(1))
    >>> merge(output, logs, torch.tensor([[3.0, 5.0]]), torch.zeros(1))
    >>> output, logs.exp()
    (tensor([[2., 4.]]), tensor([2.]))
    """
    output.lerp_(block.to(output.dtype), torch.sigmoid(block_logs - logs).unsqueeze(-1))
    torch.logaddexp(logs, block_logs, out=logs)


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype of sums over blocks: half types are too coarse for a softmax in several steps."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
