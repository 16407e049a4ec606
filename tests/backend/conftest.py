"""Fixtures of several files: what carries messages between hosts, and a control group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from transports import require


@pytest.fixture(params=["tcp", pytest.param("ucx", marks=pytest.mark.slow)])
def host_transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What carries messages between the hosts of a test."""
    require(request.param)
    monkeypatch.setenv("DIST_PRIMS_TRANSPORT", request.param)
    return str(request.param)


@pytest.fixture
def control_group() -> Iterator[Path]:
    """The folder of a control group of this test alone; its processes must end before the test."""
    folder = Path(f"/sys/fs/cgroup/memory/dist_prims_{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    yield folder
    folder.rmdir()
