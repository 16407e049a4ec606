"""Per-sample gradients and their norms: what the loop over samples gives, for every layer, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.patterns.per_sample import PerSampleGradients, over_pool
from dist_prims.patterns.per_sample.factors import Matrix

COUNT = 5


class Calls(nn.Module):
    """Layers, and a function that says how they are called."""

    def __init__(self, run: Callable[..., torch.Tensor], **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = run

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.run(self, *inputs)


class Double(torch.autograd.Function):
    """A user's own, which torch-function modes do not see."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def transposed(m: Any, x: torch.Tensor) -> torch.Tensor:
    """As many positions as samples: which dimension is whose cannot be told from the sizes."""
    return m.a(torch.relu(m.a(x.transpose(0, 1))).flatten(0, 1)).view(x.shape[1], x.shape[0], -1).transpose(0, 1)


def in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = m.a(x).relu_()
    y = m.b(x).mul_(2)
    y += x
    return y


def tied() -> nn.Module:
    table = nn.Embedding(7, 4)
    model = Calls(lambda m, x: m.out(m.mix(m.table(x))), table=table, mix=nn.Linear(4, 4), out=nn.Linear(4, 7))
    model.out.weight = table.weight  # type: ignore[union-attr]
    return model


def floats(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(COUNT, *shape)


def words(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(7, (COUNT, *shape))


ATTENTION = {"a.in_proj_weight", "a.in_proj_bias", "a.out_proj.weight", "a.out_proj.bias"}
Case = tuple[Callable[[], nn.Module], Callable[[], Any], set[str]]  # what falls back to vmap
CASES: dict[str, Case] = {
    "linear": (lambda: nn.Linear(4, 3), floats(4), set()),
    "linear of a sequence, multiplied out": (lambda: nn.Linear(2, 3), floats(9, 2), set()),
    "linear of a sequence, by Gram": (lambda: nn.Linear(20, 30), floats(3, 20), set()),
    "linear of one output": (
        lambda: Calls(lambda m, x: F.linear(x, m.w), w=nn.Parameter(torch.randn(4))), floats(6, 4), set(),
    ),
    "linear of a sequence of sequences": (lambda: nn.Linear(4, 3, bias=False), floats(2, 3, 4), set()),
    "bilinear": (
        lambda: nn.Bilinear(4, 3, 2), lambda: (torch.randn(COUNT, 4), torch.randn(COUNT, 3)), {"weight", "bias"},
    ),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), floats(3, 8), set()),
    "conv2d": (lambda: nn.Conv2d(2, 3, (3, 2), (1, 2), (2, 0), (2, 1)), floats(2, 7, 6), set()),
    "conv2d same, in groups": (lambda: nn.Conv2d(4, 6, (4, 3), padding="same", groups=2), floats(4, 5, 5), set()),
    "conv2d, circular": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), floats(2, 5, 5), set()),
    "conv2d, valid": (lambda: nn.Conv2d(2, 2, 1, padding="valid", bias=False), floats(2, 5, 5), set()),
    "conv2d of single images": (
        lambda: Calls(lambda m, x: m.a(x[0])[None], a=nn.Conv2d(2, 3, 3)), floats(2, 5, 5), set(),
    ),
    "conv2d of frames": (
        lambda: Calls(lambda m, x: m.a(x.flatten(0, 1)).flatten(1)[None], a=nn.Conv2d(2, 3, 3)),
        floats(4, 2, 5, 5), set(),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=1, groups=1), floats(2, 3, 4, 3), set()),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(4, 6, 3, 1, 1, 1, 2, dilation=2), floats(4, 5), set()),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(2, 3, 3, 2, 1, 1), floats(2, 4, 3), set()),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(2, 2, 2, 2), floats(2, 2, 3, 2), set()),
    "embedding": (lambda: nn.Embedding(7, 3), words(6), set()),
    "embedding with padding": (lambda: nn.Embedding(7, 3, padding_idx=-5), words(4, 3), set()),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm((3, 6))), floats(3, 4), set()),
    "RMS norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6)), floats(3, 4), set()),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6)), floats(2, 5, 5), set()),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), floats(3, 4, 4), set()),
    "instance norm, tracked": (
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True).eval(), floats(3, 4), set(),
    ),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval(), floats(4), set()),
    "batch norm of images": (
        lambda: nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 2)).eval(), floats(2, 4, 4), set(),
    ),
    "batch norm of each image": (
        lambda: nn.BatchNorm2d(2, track_running_stats=False).eval(), floats(2, 4, 4), {"weight", "bias"},
    ),
    "linear twice": (lambda: Calls(lambda m, x: m.a(torch.tanh(m.a(x))), a=nn.Linear(4, 4)), floats(4), set()),
    "conv twice": (
        lambda: Calls(lambda m, x: m.a(torch.tanh(m.a(x))), a=nn.Conv2d(2, 2, 3)), floats(2, 7, 7), set(),
    ),
    "embedding and norm twice": (
        lambda: Calls(lambda m, x: m.n(m.a(x[:, :2]) + m.n(m.a(x[:, 1:]))), a=nn.Embedding(7, 3), n=nn.LayerNorm(3)),
        words(3), set(),
    ),
    "embedding that is the output, too": (tied, words(3), {"table.weight"}),
    "positions, the same for all": (
        lambda: Calls(
            lambda m, x: m.b(m.a(x) + m.p(torch.arange(3)).relu_()),
            a=nn.Embedding(7, 4), p=nn.Embedding(3, 4), b=nn.Linear(4, 2),
        ),
        words(3), set(),
    ),
    "as many positions as samples": (lambda: Calls(transposed, a=nn.Linear(4, 4)), floats(COUNT, 4), set()),
    "in place": (lambda: Calls(in_place, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), floats(4), set()),
    "a scale of one's own": (
        lambda: Calls(lambda m, x: m.a(x) * m.s, a=nn.Linear(4, 3), s=nn.Parameter(torch.randn(3))), floats(4), {"s"},
    ),
    "a function of one's own": (
        lambda: Calls(lambda m, x: F.linear(x, Double.apply(m.a.weight), m.a.bias), a=nn.Linear(4, 3)), floats(4),
        {"a.weight"},
    ),
    "a transform of one's own": (
        lambda: Calls(lambda m, x: torch.func.grad(lambda z: torch.tanh(m.a(x) * z).sum())(torch.ones(3))[None],
                      a=nn.Linear(4, 3)),
        floats(4), {"a.weight", "a.bias"},
    ),
    "a known and an unknown use": (
        lambda: Calls(lambda m, x: m.a(x) + x @ m.a.weight.T, a=nn.Linear(4, 3)), floats(4), {"a.weight"},
    ),
    "attention": (
        lambda: Calls(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(4, 2, batch_first=True)),
        floats(3, 4), ATTENTION,
    ),
    "an unused layer": (lambda: Calls(lambda m, x: m.a(x), a=nn.Linear(4, 3), b=nn.Linear(2, 2)), floats(4), set()),
    "a switched off layer": (
        lambda: Calls(lambda m, x: m.a(x) + m.b(x).detach(), a=nn.Linear(4, 3), b=nn.Linear(4, 3)), floats(4), set(),
    ),
}  # fmt: skip


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target.view(-1, *[1] * (output.dim() - 1))).square().mean()


def by_backward(model: nn.Module, inputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loop of the article, with nothing of ours in it."""
    rows: dict[str, list[torch.Tensor]] = {name: [] for name, _ in model.named_parameters()}
    losses = []
    for number in range(len(targets)):
        one = [each[number : number + 1] for each in (inputs if isinstance(inputs, tuple) else (inputs,))]
        model.zero_grad()
        loss = square(model(*one), targets[number : number + 1])
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.detach())
        for name, parameter in model.named_parameters():
            rows[name].append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())
    return torch.stack(losses), {name: torch.stack(grads) for name, grads in rows.items()}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CASES)
def test_every_layer_gives_what_the_loop_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    make, draw, expected = CASES[name]
    model, inputs, targets = make(), draw(), torch.randn(COUNT)
    losses, grads = by_backward(model, inputs, targets)
    norms = torch.stack([each.flatten(1).square().sum(1) for each in grads.values()]).sum(0).sqrt()
    fallen: set[str] = set()
    plain = PerSampleGradients._by_vmap

    def noted(samples: Any, x: Any, y: Any, names: list[str]) -> Any:
        fallen.update(names)
        return plain(samples, x, y, names)

    monkeypatch.setattr(PerSampleGradients, "_by_vmap", noted)
    for method in ("trick", "vmap", "loop"):
        fallen.clear()
        samples = PerSampleGradients(model, square, method=method)
        found = samples.norms_and_losses(inputs, targets)
        torch.testing.assert_close(found["norms"], norms, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["losses"], losses, rtol=1e-5, atol=1e-5)
        for key, grad in samples.gradients(inputs, targets).items():
            torch.testing.assert_close(grad, grads[key], rtol=1e-5, atol=1e-5, msg=(key + ": {}").format)
            single = PerSampleGradients(model, square, key, method=method).norms(inputs, targets)
            torch.testing.assert_close(single, grads[key].flatten(1).norm(dim=1), rtol=1e-5, atol=1e-5)
        assert fallen == {"trick": expected, "vmap": {*grads}, "loop": set()}[method]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(data=st.data(), dims=st.integers(1, 3), transposed=st.booleans(), groups=st.integers(1, 3))
def test_convolutions_of_any_kind(data: st.DataObject, dims: int, transposed: bool, groups: int) -> None:
    def draw(low: int, high: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=dims, max_size=dims))

    kernel, stride, padding, dilation, sizes = draw(1, 3), draw(1, 3), draw(0, 2), draw(1, 2), draw(3, 5)
    channels = [groups * count for count in data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))]
    kinds: Any = (
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        if transposed
        else (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    )
    more = {"output_padding": [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]} if transposed else {}
    model = kinds[dims - 1](*channels, kernel, stride, padding, dilation=dilation, groups=groups, **more).double()
    inputs, targets = torch.randn(3, channels[0], *sizes).double(), torch.randn(3).double()
    try:
        model(inputs)
    except RuntimeError:  # the kernel is larger than what it goes over
        assume(False)
    _, grads = by_backward(model, inputs, targets)
    samples = PerSampleGradients(model, square)
    for key, grad in samples.gradients(inputs, targets).items():
        torch.testing.assert_close(grad, grads[key])
        norms = PerSampleGradients(model, square, key).norms(inputs, targets)
        torch.testing.assert_close(norms.double(), grad.flatten(1).norm(dim=1), rtol=1e-5, atol=1e-6)


@settings(deadline=None)
@given(shape=st.tuples(*[st.integers(1, 5)] * 3), rows=st.integers(1, 20), columns=st.integers(1, 20))
def test_the_norm_does_not_depend_on_the_way(shape: tuple[int, int, int], rows: int, columns: int) -> None:
    part = Matrix(torch.randn(*shape, rows).double(), torch.randn(*shape, columns).double())
    torch.testing.assert_close(part.squares(), part.gradient().square().sum((1, 2, 3)))


def test_half_types_do_not_overflow() -> None:
    model = nn.Linear(4, 3).half()
    x, y = torch.full((2, 4), 100.0).half(), torch.zeros(2).half()
    norms = PerSampleGradients(model, lambda output, y: (output * 300).sum() + y.sum()).norms(x, y)
    torch.testing.assert_close(norms, torch.full((2,), (3 * (4 * 100.0**2 + 1) * 300.0**2) ** 0.5), rtol=1e-3, atol=0)


def test_gradients_stay_and_parameters_are_chosen_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    model[0].bias.requires_grad_(False)
    model(torch.ones(1, 4)).sum().backward()
    before = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
    x, y = torch.randn(COUNT, 4), torch.randn(COUNT)
    assert PerSampleGradients(model, square).names == ["0.weight", "2.weight", "2.bias"]
    assert PerSampleGradients(model, square, ["2", "0.bias"]).names == ["0.bias", "2.weight", "2.bias"]
    _, grads = by_backward(nn.Sequential(*model), x, y)
    model.zero_grad()
    for each, grad in zip(model.parameters(), before, strict=True):
        each.grad = grad
    samples = PerSampleGradients(model, square, "2.weight")
    with torch.no_grad():  # what the caller has switched off is switched on for what needs it
        torch.testing.assert_close(samples.norms(x, y), grads["2.weight"].flatten(1).norm(dim=1))
    for each, grad in zip(model.parameters(), before, strict=True):
        assert each.grad is grad
    assert not any(each.requires_grad for each in samples.gradients(x, y).values())
    for method in ("trick", "vmap", "loop"):
        empty = PerSampleGradients(model, square, method=method)
        assert empty.norms(x[:0], y[:0]).shape == (0,)
        assert {name: tuple(each.shape) for name, each in empty.gradients(x[:0], y[:0]).items()} == {
            "0.weight": (0, 3, 4), "2.weight": (0, 2, 3), "2.bias": (0, 2),
        }  # fmt: skip


def test_wrong_arguments_and_models_are_refused() -> None:
    x, y = torch.randn(3, 4), torch.randn(3)
    with pytest.raises(ValueError, match="method='magic'; choose one of trick, vmap, loop"):
        PerSampleGradients(nn.Linear(4, 3), square, method="magic")
    with pytest.raises(ValueError, match=r"of='conv2' is no layer and no parameter; there are \['weight', 'bias'\]"):
        PerSampleGradients(nn.Linear(4, 3), square, "conv2")
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        PerSampleGradients(nn.ReLU(), square)
    with pytest.raises(ValueError, match=r"inputs and targets have \[2, 3\] samples"):
        PerSampleGradients(nn.Linear(4, 3), square).norms(x, y[:2])
    with pytest.raises(ValueError, match=r"the loss of a sample has shape \(1, 3\); it must be one number"):
        PerSampleGradients(nn.Linear(4, 3), lambda output, target: output).norms(x, y)
    for method in ("trick", "vmap", "loop"):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        with pytest.raises(ValueError, match=r"BatchNorm1d '1' is in training mode.*call model.eval\(\), or 1.eval"):
            PerSampleGradients(model, square, method=method).norms(x, y)
    with pytest.raises(ValueError, match="an embedding with max_norm"):
        PerSampleGradients(nn.Embedding(7, 3, max_norm=1.0), square).norms(torch.randint(7, (3, 2)), y)

    def changes(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(m.a(x))
        y = m.b(x)
        x += 1
        return y + x

    changing = Calls(changes, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"in place|inplace"):
        PerSampleGradients(changing, square).norms(x, y)
    with pytest.raises(RuntimeError, match=r"the input of the layer of 'b.weight' was changed in place"):
        PerSampleGradients(changing, square, "b").norms(x, y)


@pytest.mark.parametrize(
    ("size", "backend"),
    [(1, "dist_prims"), (2, "gloo"), (3, "dist_prims"), pytest.param(7, "dist_prims", marks=pytest.mark.slow)],
)
def test_a_pool_on_all_ranks(size: int, backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    xs, ys = torch.randn(10, 4), torch.arange(10) % 3
    samples = PerSampleGradients(model, F.cross_entropy)

    def body() -> None:
        for count, chunk in ((0, 4), (1, 4), (3, 1), (10, 2), (10, 100)):
            pool = TensorDataset(xs[:count], ys[:count])
            alone = PerSampleGradients(model, F.cross_entropy, method="loop").norms(xs[:count], ys[:count])
            reported: list[tuple[int, int]] = []
            rows = over_pool(
                samples.norms, pool, chunk=chunk, progress=lambda *done, reported=reported: reported.append(done)
            )
            mine = len(rows.mine)
            assert reported == [(min(mine, done + chunk), mine) for done in range(0, mine, chunk)]
            torch.testing.assert_close(rows.gather(), alone, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(rows.local, alone[rows.mine.start : rows.mine.stop], rtol=1e-5, atol=1e-5)
            at_root = rows.gather(root=0)
            assert at_root is None if dist.get_rank() else len(at_root) == count
            for k in (0, 1, 4, 99):
                values, places = rows.top(k)
                best = rows.gather().topk(min(k, count))
                assert torch.equal(values, best.values)
                assert torch.equal(places, best.indices)
        items = [(x, int(y)) for x, y in zip(xs, ys, strict=True)]  # a list is a pool, too
        both = over_pool(samples.norms_and_losses, items, chunk=3)
        torch.testing.assert_close(both["norms"].top(3)[0], alone.topk(3).values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(both.gather()["losses"], F.cross_entropy(model(xs), ys, reduction="none").detach())
        grads = over_pool(samples.gradients, TensorDataset(xs, ys), chunk=3).gather()
        for name, grad in samples.gradients(xs, ys).items():
            torch.testing.assert_close(grads[name], grad)

    dist_prims.spawn(body, size, timeout=60, backend=backend)


@pytest.mark.slow
@settings(deadline=None, max_examples=5)
@given(values=st.lists(st.sampled_from([0.0, 1.0, -1.0, 5.0, float("nan")]), max_size=9), k=st.integers(0, 10))
def test_the_largest_of_all_are_in_order(values: list[float], k: int) -> None:
    def body() -> None:
        best, places = over_pool(lambda x: x, TensorDataset(torch.tensor(values))).top(k)
        rank_of = sorted(range(len(values)), key=lambda at: (values[at] == values[at], -values[at], at))[:k]
        assert places.tolist() == rank_of
        assert torch.equal(best.nan_to_num(9), torch.tensor(values)[places].nan_to_num(9))

    dist_prims.spawn(body, 3, timeout=60)


def test_ranks_that_disagree_get_an_error_and_go_on() -> None:
    def body() -> None:
        rank = dist.get_rank()
        pool = TensorDataset(torch.arange(6.0))
        with pytest.raises(MismatchError, match=r"Rank 0 has 6 items.*rank 1 has 5 items"):
            over_pool(lambda x: x, pool if rank == 0 else range(5))
        with pytest.raises(MismatchError, match=r"rank 2 has rows .*int64"):
            over_pool(lambda x: x.long() if rank == 2 else x, pool)

        def fails(x: torch.Tensor) -> torch.Tensor:
            raise OSError("bad sector")

        with pytest.raises(OSError if rank == 1 else MismatchError, match="bad sector"):
            over_pool(fails if rank == 1 else lambda x: x, pool)
        with pytest.raises(ValueError, match="chunk=0 must be at least 1"):
            over_pool(lambda x: x, pool, chunk=0)
        with pytest.raises(ValueError, match=r"returned a tensor of shape \(\) for 2 items"):
            over_pool(torch.Tensor.sum, pool)
        rows = over_pool(lambda x: x, pool)
        with pytest.raises(ValueError, match="k=-1 must be 0 or more"):
            rows.top(-1)
        with pytest.raises(ValueError, match=r"have no order.*rows\['norms'\]"):
            over_pool(lambda x: x[:, None], pool).top(1)
        with pytest.raises(ValueError, match="there is no 'norms'; there are"):
            over_pool(lambda x: {"losses": x}, pool)["norms"]
        with pytest.raises(MismatchError, match=r"PoolRows.top\(1\).*PoolRows.top\(2\)"):
            rows.top(1 + (rank == 2))
        assert rows.top(1)[0].tolist() == [5.0]

    dist_prims.spawn(body, 3, timeout=60)
