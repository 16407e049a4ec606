"""One block of attention, queries against some of the keys: its output, and the log of its softmax's denominator.

With these logarithms blocks that were computed apart can be merged, and a block's gradient needs nothing of the other
blocks but the merged output and logarithm: p = exp(score - logsumexp) is then the share in the whole softmax. So the
flash kernel behind ``scaled_dot_product_attention`` is called directly.

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
    """The tensors as the flash kernel takes them: features side by side, and equally many. Zeros as further features
    change nothing. The dtype of q is the dtype of the computation.

    >>> q, v = torch.randn(1, 1, 8, 6).bfloat16(), torch.randn(1, 1, 8, 4).bfloat16()
    >>> [(x.dtype, x.shape[3]) for x in prepared(q, q, v, True)]
    [(torch.float64, 6), (torch.bfloat16, 6), (torch.bfloat16, 6)]
    """
    one_q, one_k, one_v = (x[:1, :1, :1].detach().contiguous() for x in (q, k, v))  # enough for the choice
    if one_q.numel() and chosen_attention(one_q, one_k, one_v, causal=causal) != SDPBackend.FLASH_ATTENTION:
        width = max(q.shape[3], v.shape[3])
        q, k, v = (F.pad(x, (0, width - x.shape[3])) for x in (q, k, v))
        q = q if wide(q) == q.dtype else q.to(torch.float64)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output and logarithms."""
    k, v = (x.to(q.dtype).expand(-1, q.shape[1], -1, -1) for x in (k, v))
    output, logs = flash_attention(q, k, v, causal, scale)
    return output, logs


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, logs: Tensor, causal: bool, scale: float
) -> Tensors:
    """The gradients of q, k and v; ``output`` and ``logs`` are merged from all keys."""
    k, v = (x.to(q.dtype).expand(-1, q.shape[1], -1, -1) for x in (k, v))
    of_q, of_k, of_v = flash_attention_backward(grad, q, k, v, output, logs, causal=causal, scale=scale)
    if q.shape[1] > 1:
        of_k, of_v = of_k.sum(1, keepdim=True), of_v.sum(1, keepdim=True)
    return of_q, of_k, of_v


def merge(output: Tensor, logs: Tensor, block: Tensor, block_logs: Tensor) -> None:
    """Merge a block into the output so far, in place; a logarithm of -inf means that nothing was merged yet.

    >>> output, logs = torch.zeros(1, 2), torch.full((1,), -torch.inf)
    >>> merge(output, logs, torch.tensor([[1.0, 3.0]]), torch.zeros(1))
    >>> merge(output, logs, torch.tensor([[3.0, 5.0]]), torch.zeros(1))
    >>> output, logs.exp()
    (tensor([[2., 4.]]), tensor([2.]))
    """
    output.lerp_(block.to(output.dtype), torch.sigmoid(block_logs - logs).unsqueeze(-1))
    torch.logaddexp(logs, block_logs, out=logs)


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype of sums: half types are too coarse for a softmax in several steps."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
