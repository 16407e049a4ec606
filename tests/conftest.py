"""What all tests share: torch's compiler, imported once here and not by each rank that a test forks.

The first optimizer, profiler or nested tensor of a process imports it, which takes seconds where many do it at once.
"""

import torch._dynamo  # noqa: F401
