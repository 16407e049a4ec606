"""Wrong cards, variants and names: no call that does not name the algorithm fails because of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dist_prims.collectives.algorithm_choice import cheapest
from dist_prims.schedules import Card, Step, algorithm, algorithms, lookup, registry, unregister
from dist_prims.schedules.load import Hosts, Load
from dist_prims.schedules.recommend import recommend
from dist_prims.schedules.topology import Level, Topology

COSTS = Level(1e-6, 1e-10), Level(20e-6, 1e-9)


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    unregister("all_gather", "mine")


def names_of(*hosts: int) -> list[str]:
    """The candidates for an all_gather of 1 MB, the best one first."""
    return [each.name for each in recommend("all_gather", 1e6, Topology(hosts, *COSTS)).candidates]


def card_of(count: float) -> Card:
    """A card by which every count of the load is this number."""
    load = Load(np.ones(1, np.int64), np.full((1, 11), count), np.full(11, count), 1)
    return Card("1", "0", "never", "this test", load=lambda _: [load])


def one_by_one(size: int) -> Iterator[Step]:
    """Right, and dear."""
    for rank in range(size):
        for other in range(size):
            yield Step(src=rank, dst=other, chunk=rank)


def strays(size: int) -> Iterator[Step]:
    yield Step(src=0, dst=size + 5, chunk=0)


def test_a_card_without_cost_is_not_believed() -> None:
    """The dearest algorithm was chosen by such a card."""
    algorithm("all_gather", name="mine", card=card_of(0))(one_by_one)
    names = names_of(3, 3)
    assert "mine" in names[1:]
    assert cheapest("all_gather", 6, 1 << 20) != "mine"


def test_a_part_that_is_registered_again_is_priced_again() -> None:
    """The price of a hierarchy was remembered by the names of its parts, and then a rank that does not exist was an
    IndexError of plain calls."""
    algorithm("all_gather", name="mine", trust=True)(one_by_one)
    assert "hierarchical inner=ring outer=mine" in names_of(3, 3)
    algorithm("all_gather", name="mine", card=card_of(0), trust=True)(strays)
    with pytest.warns(UserWarning, match="all_gather 'mine' for 6 ranks.* is not chosen .*rank that does not exist"):
        assert not any("mine" in name for name in names_of(3, 3))


@pytest.mark.parametrize(
    ("card", "problem"),
    [(None, "has no card with a load"), (card_of(np.nan), "load that is no count"), (card_of(-1), "that is no count")],
    ids=["none", "nan", "negative"],
)
def test_an_algorithm_without_a_usable_card_is_left_out_above_512_ranks(card: Card | None, problem: str) -> None:
    """The choice counted its steps, which may take hours."""
    algorithm("all_gather", name="mine", card=card, trust=True)(lambda size: pytest.fail("the steps were generated"))
    with pytest.warns(UserWarning, match=f"all_gather 'mine' for 8000 ranks is not chosen .*{problem}"):
        assert "mine" not in names_of(8000)
    assert cheapest("all_gather", 8000, 1 << 20) != "mine"


@pytest.mark.parametrize("variants", [{"radix": 3}, [3], [{"size": 3}], [{"depth": 3}]])
def test_variants_that_no_choice_could_try_are_refused(variants: Any) -> None:
    """They were a TypeError of the calls that chose an algorithm."""
    algorithm("all_gather", name="mine", variants=[{"radix": 3}])(lambda size, radix=2: one_by_one(size))
    assert "mine radix=3" in names_of(2, 2)
    with pytest.raises(ValueError, match=r"all_gather 'mine': variants=.*a list of mappings of parameters \(radix\)"):
        algorithm("all_gather", name="mine", variants=variants)(lambda size, radix=2: one_by_one(size))
    with pytest.raises(ValueError, match=r"name=5\): the name must be text"):
        algorithm("all_gather", name=5)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*is not chosen automatically")
@pytest.mark.parametrize("which", ["bine", "every algorithm"])
def test_an_algorithm_of_the_package_that_raises_is_left_out(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the card of one algorithm was the error of every call that chose among all."""
    algorithm("all_gather", name="mine")(one_by_one)

    def raises(hosts: Hosts, **parameters: Any) -> list[Any]:
        raise KeyError(len(hosts.ranks))

    for name in algorithms("all_gather"):
        if which in (name, "every algorithm"):
            broken = lookup("all_gather", name)
            card = Card("1", "0", "never", "this test", load=raises)
            monkeypatch.setitem(registry._registry, ("all_gather", name), replace(broken, card=card))
    with pytest.warns(
        UserWarning, match=r"all_gather 'bine' for 5 ranks is not chosen .* raises KeyError.*bug of dist_p"
    ):
        names = [each.name for each in recommend("all_gather", 1e6, Topology((2, 3), *COSTS)).candidates]
    assert "bine" not in names
    assert "mine" in names
    assert (names == ["mine"]) is (which == "every algorithm")
    assert cheapest("all_gather", 5, 1 << 20) in names
