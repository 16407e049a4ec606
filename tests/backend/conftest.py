"""Fixtures of the tests of groups that span hosts."""

from __future__ import annotations

import pytest
from transports import require


@pytest.fixture(params=["tcp", pytest.param("ucx", marks=pytest.mark.slow)])
def host_transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What carries messages between the hosts of a test."""
    require(request.param)
    monkeypatch.setenv("DIST_PRIMS_TRANSPORT", request.param)
    return str(request.param)
