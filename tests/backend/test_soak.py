"""What a rank uses while groups are made and destroyed over and over: see tests/helpers/soak.py."""

from __future__ import annotations

import pytest
from soak import Options, Usage, run

LAYOUTS = pytest.mark.parametrize(
    ("layout", "engine"), [("a a a", ""), ("a a b", "tcp")], ids=["one host", "two hosts"]
)


def check(usages: list[Usage], bytes_for_each_group: int) -> None:
    for usage in usages:
        for name in ("descriptors", "threads", "files"):
            assert len(usage.values(name)) == 1, usage.text()
        fewest, *_, most = [*usage.values("mappings")] * 2
        assert most - fewest <= 8, usage.text()  # heaps of the C library
        groups = usage.samples[-1].groups - usage.samples[0].groups
        assert groups >= 40, usage.text()
        assert usage.growth() <= 8 * 2**20 + groups * bytes_for_each_group, usage.text()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [4, pytest.param(12, marks=pytest.mark.slow)])
@LAYOUTS
def test_a_rank_uses_no_more_after_many_groups(layout: str, engine: str, seconds: float) -> None:
    check(run(Options(seconds, least_groups=120, layout=layout, engine=engine)), bytes_for_each_group=8192)


@pytest.mark.long(minutes=3)
@pytest.mark.timeout(900)
@LAYOUTS
def test_a_rank_uses_no_more_after_a_minute(layout: str, engine: str) -> None:
    usages = run(Options(60, least_groups=200, layout=layout, engine=engine))
    check(usages, bytes_for_each_group=4096)  # torch keeps 0.2 KB, and gloo a few more
