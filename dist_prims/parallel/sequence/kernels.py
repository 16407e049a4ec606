"""One block of attention, queries against some of the keys: its output, and the log of its softmax's denominator.

With these logarithms blocks that were computed apart can be merged, and a block's gradient needs nothing of the other
blocks but the merged output and logarithm: p = exp(score - logsumexp) is then the share in the whole softmax (the plain
formula needs a mean instead of the output, see :class:`Kernel`). So the
kernels behind ``scaled_dot_product_attention`` can be called directly. They are chosen as there: by
``torch.nn.attention.sdpa_kernel`` and by the tensors; only cuDNN's, whose logarithms have another form, is replaced by
the next best. The plain formula is the fallback.

Heads of queries that share a head of keys are put side by side in a dimension of their own, in which keys and values
have stride 0: on a CPU nothing is repeated. Their gradients are temporarily as wide as that of the queries, until they
are summed over that dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...torch_compat import chosen_attention

__all__: list[str] = []

Tensor = torch.Tensor
Three = tuple[Tensor, Tensor, Tensor]
Mean = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], Tensor]
_ALIGNED = 32  # rows of logarithms that the memory-efficient kernel reads at a time


class Kernel(NamedTuple):
    """``forward(q, k, v, causal, scale)`` gives output and logarithms, ``backward(grad, q, k, v, output, logarithms,
    causal, scale)`` the three gradients.

    ``mean(grad, q, k, v, logarithms, causal, scale)``: the part of these keys in the mean gradient of a share, which is
    sum(grad * output). A kernel that has it takes the sum of the parts in place of the output. In the gradient of a
    score, share * (gradient - mean), the two are nearly equal where one key has almost all of the share. A mean of the
    same rounded numbers then cancels, as in ``scaled_dot_product_attention``; a mean from a rounded output does not.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], Three]
    mean: Mean | None = None


def choose(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Kernel:
    """The kernel that ``scaled_dot_product_attention`` would take here, grouped for heads that share keys.

    >>> q = torch.randn(1, 4, 8, 16)
    >>> with sdpa_kernel(SDPBackend.MATH):
    ...     choose(q, q, q, True).name
    'math'
    """
    one_q, one_k, one_v = (each[:, :1, :1].detach().contiguous() for each in (q, k, v))  # enough for the choice
    if not (one_q.numel() and one_v.numel()):
        return _grouped(_MATH)
    allowed = chosen_attention(one_q, one_k, one_v, causal=causal)
    if allowed == SDPBackend.CUDNN_ATTENTION:  # the next best: its logarithms have another form
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            allowed = chosen_attention(one_q, one_k, one_v, causal=causal)
    if allowed == SDPBackend.FLASH_ATTENTION and q.device.type == "cpu":
        return _grouped(_CPU)
    if q.device.type == "cuda" and q.shape[-1] % 8 == 0 and q.shape[-1] == v.shape[-1]:
        return _grouped(_CUDA.get(allowed, _MATH))
    return _grouped(_MATH)


def merge(output: Tensor, logs: Tensor, block: Tensor, block_logs: Tensor) -> None:
    """Merge a block into the output so far, in place; a logarithm of -inf means that nothing was merged yet.

    >>> output, logs = torch.zeros(1, 2), torch.full((1,), -torch.inf)
    >>> merge(output, logs, torch.tensor([[1.0, 3.0]]), torch.zeros(1))
    >>> merge(output, logs, torch.tensor([[3.0, 5.0]]), torch.zeros(1))
    >>> output, logs.exp()
    (tensor([[2., 4.]]), tensor([2.]))
    """
    output.lerp_(block.to(output.dtype), torch.sigmoid(block_logs - logs).unsqueeze(-1).to(output.dtype))
    torch.logaddexp(logs, block_logs, out=logs)


def _grouped(kernel: Kernel) -> Kernel:
    """A kernel for fewer heads of keys than of queries."""

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Three:
        flat = [each.flatten(0, 1).unsqueeze(1).expand(-1, q.shape[1] // k.shape[1], -1, -1) for each in (k, v)]
        if q.device.type == "cuda":  # kernels there are not made for stride 0
            flat = [each.contiguous() for each in flat]
        return by_key(q, k), flat[0], flat[1]

    def by_key(each: Tensor, k: Tensor) -> Tensor:
        return each.reshape(-1, each.shape[1] // k.shape[1], *each.shape[2:])

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (_dense(each) for each in (q, k, v))
        if q.shape[1] == k.shape[1]:
            return kernel.forward(q, k, v, causal, scale)
        output, logs = kernel.forward(*grouped(q, k, v), causal, scale)
        return output.reshape(*q.shape[:-1], -1), logs.reshape(q.shape[:-1])

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, logs: Tensor, causal: bool, scale: float
    ) -> Three:
        grad, q, k, v = (_dense(each) for each in (grad, q, k, v))
        if q.shape[1] == k.shape[1]:
            return kernel.backward(grad, q, k, v, output, logs, causal, scale)
        grad, output, logs = (by_key(each, k) for each in (grad, output, logs))
        of_q, of_k, of_v = kernel.backward(grad, *grouped(q, k, v), output, logs, causal, scale)
        return of_q.reshape(q.shape), of_k.sum(1).view(k.shape), of_v.sum(1).view(v.shape)

    def mean(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, logs: Tensor, causal: bool, scale: float) -> Tensor:
        assert kernel.mean is not None
        grad, q, k, v = (_dense(each) for each in (grad, q, k, v))
        if q.shape[1] == k.shape[1]:
            return kernel.mean(grad, q, k, v, logs, causal, scale)
        part = kernel.mean(by_key(grad, k), *grouped(q, k, v), by_key(logs, k), causal, scale)
        return part.reshape(*q.shape[:-1], 1)

    return Kernel(kernel.name, forward, backward, mean if kernel.mean else None)


def _dense(tensor: Tensor) -> Tensor:
    """A tensor with contiguous features: the kernels ignore their stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _aten("_scaled_dot_product_flash_attention_for_cpu")(
        q, k, v, 0.0, causal, scale=scale
    )
    return found


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, logs: Tensor, causal: bool, scale: float
) -> Three:
    found: Three = _aten("_scaled_dot_product_flash_attention_for_cpu_backward")(
        grad, q, k, v, output, logs, 0.0, causal, scale=scale
    )
    return found


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    found = _aten("_scaled_dot_product_flash_attention")(q, k, v, 0.0, causal, scale=scale)
    return found[0], found[1]


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, logs: Tensor, causal: bool, scale: float
) -> Three:
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of an unused dropout
    found: Three = _aten("_scaled_dot_product_flash_attention_backward")(
        *(grad, q, k, v, output, logs.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal),
        *(seed, seed.new_empty(0)),
        scale=scale,
    )
    return found


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    found = _aten("_scaled_dot_product_efficient_attention")(q, k, v, None, True, 0.0, causal, scale=scale)
    return found[0], found[1][..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, logs: Tensor, causal: bool, scale: float
) -> Three:
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    logs = torch.nn.functional.pad(logs, (0, -logs.shape[-1] % _ALIGNED), value=torch.inf)  # exp(score - inf) = 0
    found = _aten("_scaled_dot_product_efficient_attention_backward")(
        *(grad, q, k, v, None, output, logs, seed, seed, 0.0, [True, True, True, False], causal), scale=scale
    )
    return found[0], found[1], found[2]


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = torch.matmul(q * scale, k.mT)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores.masked_fill_(~seen, -torch.inf)
    return scores


def _wide(*tensors: Tensor) -> list[Tensor]:
    """Cast to float32 at least: half types are too coarse for a softmax in several steps."""
    return [each.float() if each.dtype in (torch.float16, torch.bfloat16) else each for each in tensors]


def _math_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        wide_q, wide_k, wide_v = _wide(q, k, v)
        scores = _scores(wide_q, wide_k, causal, scale)
        largest = scores.amax(-1, keepdim=True)
        shares = scores.sub_(largest).exp_()
        total = shares.sum(-1, keepdim=True)
        logs = (largest.double() + total.double().log()).squeeze(-1)
        return torch.matmul(shares.div_(total), wide_v), logs


def _math_shares(q: Tensor, k: Tensor, logs: Tensor, causal: bool, scale: float) -> Tensor:
    """The shares of some keys in the whole softmax. Their sum over all keys is 1 to the last bit of float32, since the
    logarithms, as large as the scores, are in float64."""
    scores = _scores(q, k, causal, scale)
    high = logs.to(scores.dtype)
    low = (logs - high).to(scores.dtype)
    return scores.sub_(high.unsqueeze(-1)).sub_(low.unsqueeze(-1)).exp_()


def _math_mean(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, logs: Tensor, causal: bool, scale: float) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        grad, q, k, v = _wide(grad, q, k, v)
        return torch.matmul(grad, v.mT).mul_(_math_shares(q, k, logs, causal, scale)).sum(-1, keepdim=True)


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mean: Tensor, logs: Tensor, causal: bool, scale: float
) -> Three:
    with torch.autocast(q.device.type, enabled=False):
        grad, q, k, v = _wide(grad, q, k, v)
        shares = _math_shares(q, k, logs, causal, scale)
        of_v = torch.matmul(shares.mT, grad)
        of_scores = torch.matmul(grad, v.mT).sub_(mean).mul_(shares).mul_(scale)
        return torch.matmul(of_scores, k), torch.matmul(of_scores.mT, q), of_v


def _aten(name: str) -> Any:
    return getattr(torch.ops.aten, name)


_MATH = Kernel("math", _math_forward, _math_backward, mean=_math_mean)
_CPU = Kernel("flash on the CPU", _cpu_forward, _cpu_backward)
_CUDA = {
    SDPBackend.FLASH_ATTENTION: Kernel("flash", _flash_forward, _flash_backward),
    SDPBackend.EFFICIENT_ATTENTION: Kernel("memory-efficient", _efficient_forward, _efficient_backward),
}
