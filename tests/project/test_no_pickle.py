"""What ranks send each other is never unpickled: a pickle runs the code that its sender chooses."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dist_prims
from dist_prims import agreement
from dist_prims.agreement import broadcast_value, gather_values
from dist_prims.errors import MismatchError
from dist_prims.training.gradients import GradientAverager

PACKAGE = Path(dist_prims.__file__).parent
OF_PICKLE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
WITH_PICKLES = {  # of torch.distributed
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
# Between a process and the ranks that it has started itself, over pipes and files that no other user can open.
OF_SPAWN = {"launch/payload.py"}


def uses_of_pickle(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [each.name for each in node.names]
            modules = names if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in modules if name.partition(".")[0] in OF_PICKLE)
            yield from (name for name in names if name in WITH_PICKLES)
        elif isinstance(node, ast.Attribute) and node.attr in WITH_PICKLES:
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load" and not _is_safe(node):
            yield "torch.load without weights_only=True"


def _is_safe(load: ast.Call) -> bool:
    return "weights_only=True" in [ast.unparse(each) for each in load.keywords]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_unpickles_what_comes_from_another_rank(path: Path) -> None:
    if str(path.relative_to(PACKAGE)) not in OF_SPAWN:
        assert not [*uses_of_pickle(path.read_text())]


def test_the_search_finds_pickles() -> None:
    text = "import pickle\nfrom torch.distributed import gather_object\ndist.all_gather_object(a, b)\ntorch.load(f)"
    assert len([*uses_of_pickle(text)]) == 4


class Malicious:
    """An object whose pickle creates a file when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def test_a_pickle_that_a_rank_sends_does_not_run(tmp_path: Path) -> None:
    old_way, new_way = tmp_path / "old way", tmp_path / "new way"

    def attack() -> str:
        if dist.get_rank() == 1:
            text = pickle.dumps(Malicious(str(new_way)), protocol=0).decode("ascii")
            module: Any = agreement
            module.to_text = lambda value: text
        try:
            GradientAverager(torch.nn.Linear(2, 2))
        except ValueError as error:
            return str(error)
        return "made"

    def careless() -> None:
        dist.all_gather_object([None, None], Malicious(str(old_way)))

    first, _ = dist_prims.spawn(attack, 2, timeout=60)
    assert first.startswith("not a plain value: ")
    assert not new_way.exists()
    dist_prims.spawn(careless, 2, timeout=60)
    assert old_way.exists()  # so the pickle does what it is for


VALUES = [
    None,
    "",
    "ä" * 5000,
    [1.5, float("inf"), -(2**70)],
    (True, ("a", {"b": (1,), 3: torch.bfloat16, (1, "x"): None})),
    torch.Size([2, 3]),
    {},
]


def test_values_arrive_as_they_were() -> None:
    def gathered() -> tuple[bool, bool]:
        rank = dist.get_rank()
        rows = [gather_values((rank, value) if rank else value, None) for value in VALUES]
        right = [[value, (1, value), (2, value)] for value in VALUES]
        return rows == right, [broadcast_value(value if rank == 2 else None, 2, None) for value in VALUES] == VALUES

    assert dist_prims.spawn(gathered, 3, timeout=60) == [(True, True)] * 3


def test_a_value_that_is_not_plain_is_an_error_on_every_rank() -> None:
    def send() -> list[str]:
        rank, texts = dist.get_rank(), []
        for call in (lambda value: gather_values(value, None), lambda value: broadcast_value(value, 1, None)):
            with pytest.raises((TypeError, MismatchError)) as caught:
                call({1, 2} if rank == 1 else [])
            texts.append(f"{type(caught.value).__name__} {caught.value}")
        return texts

    first, second = dist_prims.spawn(send, 2, timeout=60)
    assert all(text.startswith("TypeError a set cannot be sent to other ranks") for text in second)
    assert first[0].startswith("MismatchError rank 0: gather: rank 1 failed: TypeError: a set cannot be sent")
    assert first[1].startswith("MismatchError rank 0: broadcast: rank 1 failed: TypeError: a set cannot be sent")
