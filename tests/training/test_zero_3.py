"""ZeRO-3: sharded parameters train as the plain run does, and at most one unit of them is whole."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharding import alike, average, loss_of, nbytes, spawn, states
from torch.utils.checkpoint import checkpoint

import dist_prims
from dist_prims.errors import MismatchError, PeerLeftError
from dist_prims.training.sharding import ShardedParameters


class MixedNet(torch.nn.Module):
    """Tied weights, two dtypes, a frozen layer, an unused one, one for each rank, a buffer, empty and scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(7, 6)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(3))
        self.fine = torch.nn.Linear(6, 6).double()
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.branch = torch.nn.ModuleDict({str(n): torch.nn.Linear(6, 6) for n in range(2)})
        self.unused = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale, self.empty = torch.nn.Parameter(torch.tensor(1.5)), torch.nn.Parameter(torch.ones(0))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.frozen(x) + self.fine(x.double()).float() * self.scale + self.empty.sum()
        logits: torch.Tensor = self.head(self.norm(self.branch[str(branch)](x)))
        return logits


def accumulated(model: torch.nn.Module, steps: Iterable[int], branch: int | None) -> None:
    """Each backward's gradients averaged, then added up."""
    total: dict[torch.nn.Parameter, torch.Tensor] = {}
    for step in steps:
        model.zero_grad()
        loss_of(model, step, dist.get_rank(), branch).backward()
        average(model)
        for each in model.parameters():
            if each.grad is not None:
                total[each] = total[each] + each.grad if each in total else each.grad.clone()
    for each in model.parameters():
        each.grad = total.get(each)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("units", "size"), [("two", 1), ("none", 2), ("two", 3), ("children", 4)])
def test_zero_3_trains_as_the_plain_run(units: str, size: int) -> None:
    def body(exact: bool) -> None:
        rank, model, plain = dist.get_rank(), MixedNet(), MixedNet()
        if rank:  # rank 0's values count
            torch.nn.init.zeros_(model.scale)
        named = {"children": None, "two": [model.blocks[1], model.fine], "none": []}[units]
        branch = 0 if units == "children" else None  # all ranks run the same units; what runs in them may differ
        sharded = ShardedParameters(model, named)
        kind = torch.optim.Adam if exact else torch.optim.SGD  # Adam makes steps of a gradient that is only rounding
        optimizer, twin = (kind(each, lr=0.01) for each in (sharded.parameters(), plain.parameters()))
        for step in range(3):
            optimizer.zero_grad()
            for micro in (2 * step, 2 * step + 1):
                loss_of(model, micro, rank, branch).backward()
            accumulated(plain, (2 * step, 2 * step + 1), branch)
            for over in (optimizer, twin):
                over.step()
        alike(sharded.state_dict().values(), plain.state_dict().values(), exact)
        loss = loss_of(plain.eval(), 9, rank, 0)
        model.eval()
        for mode in (torch.no_grad, torch.inference_mode, sharded.gathered):
            with mode():
                alike([loss_of(model, 9, rank, 0)], [loss], exact)

    spawn(body, size, True)
    if size == 3 and units == "two":
        spawn(body, size, False, backend="gloo")


def test_zero_3_clips_as_the_plain_run() -> None:
    def body() -> None:
        model, plain = MixedNet(), MixedNet()
        sharded = ShardedParameters(model)
        loss_of(model, 0, dist.get_rank(), 0).backward()
        loss_of(plain, 0, dist.get_rank(), 0).backward()
        average(plain)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        alike([sharded.clip_grad_norm(0.5)], [expected.float()], exact=False)
        left = torch.stack(
            [each.grad.double().square().sum() for each in sharded.parameters() if each.grad is not None]
        )
        total = left.sum()
        dist.all_reduce(total)
        assert abs(total.sqrt().item() - 0.5) < 1e-5

    spawn(body, 3)


def test_zero_3_holds_one_unit_at_a_time_and_gives_the_rest_back() -> None:
    def body() -> None:
        size, width, depth = dist.get_world_size(), 64, 5
        layers = [torch.nn.Linear(width, width) for _ in range(depth)]
        model = torch.nn.Sequential(*(torch.nn.Sequential(layer) for layer in layers))
        unit_bytes = nbytes(layers[0].parameters())
        sharded = ShardedParameters(model)
        optimizer = torch.optim.Adam(sharded.parameters(), lr=0.01)

        def whole() -> list[int]:
            return [n for n, each in enumerate(layers) if each.weight.untyped_storage().nbytes() > 100]

        seen = []
        for layer in layers:
            layer.register_forward_hook(lambda *_: seen.append(whole()))
            layer.register_full_backward_hook(lambda *_: seen.append(whole()))
        y = model(torch.ones(3, width, requires_grad=True))
        assert whole() == []  # though backward has yet to come
        y.sum().backward()
        optimizer.step()
        assert whole() == []
        assert seen == [*([n] for n in range(depth)), *([n] for n in reversed(range(depth)))]
        part = depth * (-(-unit_bytes // 4 // size) * 4)
        assert nbytes(sharded.parameters()) == nbytes(each.grad for each in sharded.parameters()) == part
        assert nbytes(states(optimizer)) == 2 * part
        assert sum(each.untyped_storage().nbytes() for each in model.parameters()) <= 4 * 2 * depth

    for size in (2, 3):
        spawn(body, size)


def test_zero_3_under_checkpoints() -> None:
    """Whole units that are computed again, by hooks of autograd around ours and in it; and what is not asked for."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(4)
            )
            self.again = True
            self.calls = 0
            self.layers[0].register_forward_pre_hook(self.count)

        def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
            x = torch.nn.functional.one_hot(x % 4, 4).float()
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
            return torch.nn.functional.pad(x, (0, 3))

        def count(self, *_: Any) -> None:
            self.calls += 1

    def body() -> None:
        model, plain = Model(), Model()
        plain.again = False
        sharded = ShardedParameters(model)
        loss_of(model, 0, dist.get_rank()).backward()
        assert model.calls == 2  # the checkpoint has computed it again: our hooks have not taken its place
        sharded_grads = [each.grad for each in sharded.parameters()]
        loss_of(plain, 0, dist.get_rank()).backward()
        average(plain)
        rank, size = dist.get_rank(), dist.get_world_size()
        for grad, layer in zip(sharded_grads, plain.layers, strict=True):
            flat = torch.cat([each.grad.flatten() for each in layer.parameters()])
            flat = torch.nn.functional.pad(flat, (0, -len(flat) % size))
            alike([grad], [flat.view(size, -1)[rank]])

    spawn(body, 3)


def test_zero_3_survives_what_raises() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    def body() -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
        sharded = ShardedParameters(model)
        x = torch.ones(2, 3)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 4))
        handle = model[1].register_forward_hook(lambda module, given, result: Fails.apply(result))
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
        handle.remove()
        model(x).sum().backward()  # what came before the failure is not in it
        grads = [each.grad.clone() for each in sharded.parameters()]
        plain = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
        plain.load_state_dict(sharded.state_dict())
        plain(x).sum().backward()
        for grad, layer in zip(grads, plain, strict=True):
            flat = torch.cat([each.grad.flatten() for each in layer.parameters()])
            alike([grad], [flat.view(2, -1)[dist.get_rank()]])

    spawn(body, 2)


class Branch(torch.nn.Module):
    """On rank 0 one layer, on the others two."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.one(x)
        return y if dist.get_rank() == 0 else self.other(y)


class Shift(Branch):
    """On rank 0 only a sum, whose backward reads no parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.one.bias if dist.get_rank() == 0 else super().forward(x)


@pytest.mark.parametrize(("size", "backend"), [(2, "dist_prims"), (3, "dist_prims"), (2, "gloo")])
def test_zero_3_takes_what_differs_within_a_unit(size: int, backend: str) -> None:
    """What autograd saves then differs, too: the first unit, or one whose input has a gradient on one rank only."""

    def body() -> None:
        torch.manual_seed(0)
        for wants_grad in (False, dist.get_rank() == 1):
            model = torch.nn.Sequential(Branch(), torch.nn.Tanh(), Branch(), torch.nn.Linear(3, 3))
            plain = copy.deepcopy(model)
            sharded = ShardedParameters(model)
            over, twin = (torch.optim.SGD(each, lr=0.1) for each in (sharded.parameters(), plain.parameters()))
            for step in range(2):
                x = torch.full((2, 3), 1.0 + step + dist.get_rank()).requires_grad_(wants_grad)
                for net, optimizer in ((model, over), (plain, twin)):
                    optimizer.zero_grad()
                    net(x).square().sum().backward()
                average(plain)
                over.step()
                twin.step()
            alike(sharded.state_dict().values(), plain.state_dict().values(), exact=backend != "gloo")
        model, x = (
            torch.nn.Sequential(torch.nn.Linear(3, 1)).requires_grad_(False),
            torch.ones(1, 3, requires_grad=True),
        )
        weight = ShardedParameters(model).state_dict()["0.weight"]
        model(x).sum().backward()  # none is trained
        assert torch.equal(x.grad, weight)
        layers = torch.nn.Sequential(Shift(), Shift())
        sharded = ShardedParameters(layers)
        # Once only rank 1 gathered the first unit again.
        checkpoint(layers, x.expand(1, 3), use_reentrant=True).sum().backward()
        assert all(each.grad is not None for each in sharded.parameters())

    spawn(body, size, backend=backend)


def test_zero_3_keeps_what_is_changed_within_gathered_and_refuses_other_changes() -> None:
    def body() -> None:
        x, layers = torch.ones(1, 3), [torch.nn.Linear(3, 3) for _ in range(2)]
        model = torch.nn.Sequential(*layers)
        sharded = ShardedParameters(model)
        ones = {name: torch.ones_like(each) for name, each in sharded.state_dict().items()}
        with sharded.gathered(), torch.no_grad():
            layers[0].weight.zero_()
            layers[0].bias.data.fill_(2)
            assert torch.equal(model(x), layers[1](x * 2))
        state = sharded.state_dict()
        alike([model(x)], [torch.nn.functional.linear(x * 2, state["1.weight"], state["1.bias"])])
        with sharded.gathered():
            sharded.load_state_dict(ones)
            assert torch.equal(model(x), torch.full((1, 3), 13.0))
        assert torch.equal(model(x), torch.full((1, 3), 13.0))
        with pytest.raises(RuntimeError, match="0: the shard was changed within gathered"), sharded.gathered():
            [torch.nn.init.zeros_(each) for each in (sharded.parameters()[0], layers[0].bias)]
        with pytest.raises(RuntimeError, match="zero_ reads a parameter of shape"):
            torch.nn.init.zeros_(layers[1].bias)
        with pytest.raises(RuntimeError, match="data reads a parameter of shape"):
            layers[1].bias.data = torch.zeros(3)

    def changed(change: Callable[[torch.nn.Sequential], Any]) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        sharded = ShardedParameters(model)
        change(model)
        for use in (functools.partial(model, torch.ones(1, 3)), sharded.state_dict):
            with pytest.raises(ValueError, match="1: 'weight' was replaced, frozen or unfrozen; do it before sharding"):
                use()

    spawn(body, 2)
    new = torch.ones(3, 3)
    for change in (
        lambda model: model.load_state_dict({"1.weight": new}, assign=True, strict=False),
        lambda model: setattr(model[1], "weight", torch.nn.Parameter(new)),
        lambda model: model[1].weight.requires_grad_(False),
    ):
        spawn(changed, 2, change)


def test_zero_3_refuses_copies_and_other_averaging() -> None:
    def body() -> None:
        model, x = torch.nn.Sequential(torch.nn.Linear(3, 2)), torch.ones(1, 3)
        sharded = ShardedParameters(model)
        for make in (ShardedParameters, dist_prims.GradientAverager):
            with pytest.raises(ValueError, match=r"0.weight' is sharded already"):
                make(model)
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match=r"To save or copy the model, use sharded.state_dict"):
                copied(model)
            with sharded.gathered(), pytest.raises(RuntimeError, match="cannot be copied; load state_dict"):
                copied(model)
        model(x).sum().backward()
        assert sharded.parameters()[0].grad.any()
        with pytest.raises(RuntimeError, match=r"grad reads a parameter .* Gradients are in sharded.parameters"):
            model.zero_grad()

    spawn(body, 2)


def test_zero_3_shows_what_hinders_a_forward() -> None:
    def body() -> None:
        model: Any = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, dtype=torch.half))
        x = torch.ones(1, 3)
        model.forward = lambda x: model[1](model[0](x).half())
        ShardedParameters(model, [])  # two tensors to gather
        with pytest.raises(MismatchError) as found:
            dist.all_reduce(torch.ones(3)) if dist.get_rank() else model(x)
        assert found.value.__context__ is None
        assert not model(x).isnan().any()
        with pytest.raises(RuntimeError, match="the model: isnan reads a parameter"):
            model[0].weight.isnan()  # it is let go again
        if dist.get_rank():
            return dist.destroy_process_group()
        with pytest.raises(PeerLeftError) as left:
            model(x)
        assert left.value.__context__ is None
        return None

    spawn(body, 2)


def test_zero_3_refuses() -> None:
    def body() -> None:
        rank, model = dist.get_rank(), MixedNet()
        with pytest.raises(MismatchError, match=r"Rank 0 has unit 'fine' of 2 .* rank 1 has unit '' of 2"):
            ShardedParameters(model, [(model.fine, model.frozen)[rank]])
        buffers = torch.nn.Linear(1, 1)
        buffers.register_buffer("some", torch.ones(2 + rank))
        with pytest.raises(MismatchError, match=r"tensor 'some' .*\(2,\).* rank 1 has tensor 'some' .*\(3,\)"):
            ShardedParameters(buffers)
        with pytest.raises(MismatchError, match=r"Rank 0 has tensor 'weight' .*\(2, 1\).* rank 1 has .*\(3, 1\)"):
            ShardedParameters(torch.nn.Linear(1, 2 + rank))
        with pytest.raises(ValueError, match="Linear is not a part of the model"):
            ShardedParameters(model, [torch.nn.Linear(1, 1)])
        sharded = ShardedParameters(model)
        with pytest.raises(RuntimeError, match=r"isnan reads a parameter of shape \(6, 6\) that is not gathered now"):
            torch.isnan(model.fine.weight)
        before = sharded.state_dict()
        for wrong in ("fine.weight", "more"):
            with pytest.raises(RuntimeError, match=wrong):
                sharded.load_state_dict({**{name: value + 1 for name, value in before.items()}, wrong: torch.ones(1)})
        alike(sharded.state_dict().values(), before.values())
        loss = loss_of(model, 0, rank, 0)
        with torch.no_grad():
            for each in sharded.parameters():
                each.add_(1)
        with pytest.raises(RuntimeError, match="was changed between forward and backward"):
            loss.backward()
        with pytest.raises(RuntimeError, match="half reads a parameter"):
            model.half()

    spawn(body, 2)


def test_zero_3_takes_sparse_gradients() -> None:
    def body() -> None:
        model = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 1, bias=False))
        sharded = ShardedParameters(model)
        weight = sharded.state_dict()["1.weight"]
        model(torch.tensor([dist.get_rank()])).sum().backward()
        expected = torch.zeros(2, 2, 2)
        expected[0] = weight / 2  # the rows 0 and 1 belong to rank 0, and each has the mean of one gradient and zero
        alike([sharded.parameters()[0].grad], [expected[dist.get_rank()].flatten()])

    spawn(body, 2)


def test_zero_3_in_a_part_of_the_ranks() -> None:
    def body() -> None:
        group = dist.new_group([2, 0])
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="not a member"):
                ShardedParameters(MixedNet(), group=group)
            return
        model = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(model.weight, 1.0 + dist.get_rank())
        sharded = ShardedParameters(model, group=group)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
        (model(torch.ones(1, 3)) * dist.get_rank()).sum().backward()
        optimizer.step()
        first = 1.0 + dist.get_process_group_ranks(group)[0]
        alike([sharded.state_dict()["weight"]], [torch.full((2, 3), first - 1)])

    spawn(body, 3)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y.tanh()


@pytest.mark.parametrize("autograd", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_zero_3_is_compiled_unit_by_unit(autograd: bool) -> None:
    """Once the compiler read a released parameter, and the error advised other units."""

    def body() -> None:
        torch.manual_seed(0)
        plain = torch.nn.Sequential(*(Layer() for _ in range(3)), torch.nn.Linear(4, 2))
        model = copy.deepcopy(plain)
        graphs: list[int] = []  # by their number of operations

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
            return graph.forward

        sharded = ShardedParameters(model)
        compiled: Any = torch.compile(model, backend="aot_eager" if autograd else backend)
        optimizers = [torch.optim.SGD(each, lr=0.1) for each in (sharded.parameters(), plain.parameters())]
        for step in range(3):
            x = torch.full((2, 4), 1.0 + step + dist.get_rank())
            for net, optimizer in zip((compiled, plain), optimizers, strict=True):
                optimizer.zero_grad()
                net(x).square().sum().backward()
                if net is plain:
                    average(plain)
                optimizer.step()
        alike(sharded.state_dict().values(), plain.state_dict().values(), exact=False)
        assert graphs == ([] if autograd else [2, 2, 1])  # two of a layer: the first one's input has no gradient
        with pytest.raises(Exception, match="ShardedParameters gathers a unit here"):
            torch.compile(model, fullgraph=True, backend="eager")(torch.ones(1, 4))

    spawn(body, 2)


class TiedByHand(torch.nn.Module):
    """The head multiplies by the weight of an embedding that is in another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.body(self.embedding(tokens)), self.embedding.weight)


def test_zero_3_names_a_parameter_that_is_read_out_of_turn() -> None:
    """Once the result was NaN, and nothing was said."""

    def body() -> None:
        torch.manual_seed(0)
        model, tokens = TiedByHand(), torch.tensor([1, 4])
        wanted = model(tokens)
        ShardedParameters(model)
        with pytest.raises(RuntimeError, match=r"ShardedParameters: embedding: linear reads .* shape \(5, 3\).*units="):
            model(tokens)
        torch.manual_seed(0)
        model = TiedByHand()
        ShardedParameters(model, units=[model.body])  # the remedy: the model itself holds both users
        alike([model(tokens)], [wanted])
        assert "AbsentParameter" in repr(model.embedding.weight)
        assert (model.embedding.weight.shape, model.embedding.weight.requires_grad) == ((5, 3), True)

    spawn(body, 2)


@pytest.mark.parametrize("when", ["before", "after"])
def test_zero_3_refuses_an_optimiser_of_the_model(when: str) -> None:
    """As one writes it for DDP: it trained nothing, and said nothing."""

    def body() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        sharded = ShardedParameters(model)
        optimizer = early if when == "before" else torch.optim.AdamW(model[1].parameters(), lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(
            RuntimeError, match=r"grad reads a parameter .* sharded.parameters\(\), which the optimizer"
        ):
            optimizer.step()
        other = torch.nn.Linear(1, 1)
        torch.optim.SGD([*sharded.parameters(), *other.parameters()], lr=0.1).step()  # other optimisers go on

    spawn(body, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_zero_3_on_a_gpu() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, plain = (MixedNet().cuda() for _ in range(2))
        sharded = ShardedParameters(model)
        for net, parameters in ((model, sharded.parameters()), (plain, plain.parameters())):
            optimizer = torch.optim.Adam(parameters, lr=0.01)
            net(torch.arange(5, device="cuda"), 0).square().mean().backward()
            optimizer.step()
        alike(sharded.state_dict().values(), plain.state_dict().values(), exact=False)
    finally:
        dist.destroy_process_group()
