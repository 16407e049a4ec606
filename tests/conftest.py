"""What all tests share.

torch's compiler is imported once here and not by each rank that a test forks: the first optimizer, profiler or nested
tensor of a process imports it, which takes seconds where many do it at once.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo

# Failing assertions of the helpers show both values, as those of the tests do.
pytest.register_assert_rewrite(*(path.stem for path in (Path(__file__).parent / "helpers").glob("*.py")))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As spawned ranks have: the order of additions depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
