"""What a rank uses while groups are made and destroyed over and over: see tests/helpers/soak.py."""

from __future__ import annotations

import pytest
from soak import Sample, growth, run

LAYOUTS = pytest.mark.parametrize("layout", ["a a a", "a a b"], ids=["one host", "two hosts"])


def check(samples: list[Sample], bytes_for_each_group: int) -> None:
    for name in ("descriptors", "threads", "files"):
        assert len({getattr(sample, name) for sample in samples}) == 1, samples
    mappings = [sample.mappings for sample in samples]
    assert max(mappings) - min(mappings) <= 8, samples  # heaps of the C library
    groups = samples[-1].groups - samples[0].groups
    assert groups >= 40, samples
    assert growth(samples) <= 8 * 2**20 + groups * bytes_for_each_group, samples


@pytest.mark.slow
@LAYOUTS
def test_a_rank_uses_no_more_after_many_groups(layout: str) -> None:
    for samples in run(8, layout, least_groups=120):
        check(samples, bytes_for_each_group=8192)


@pytest.mark.long(minutes=3)
@pytest.mark.timeout(900)
@LAYOUTS
def test_a_rank_uses_no_more_after_a_minute(layout: str) -> None:
    for samples in run(60, layout, least_groups=200):
        check(samples, bytes_for_each_group=4096)  # torch keeps 0.2 KB, and gloo a few more
