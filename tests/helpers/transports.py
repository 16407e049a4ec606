"""The transports between hosts that tests run over, and whether this environment has them."""

from __future__ import annotations

import pytest

from dist_prims.backend import ucx_library


def require(transport: str) -> None:
    """Skip the test where this environment cannot use the transport."""
    if transport == "ucx" and (reason := ucx_library.unusable_reason()):
        pytest.skip(f"no UCX: {reason}")
