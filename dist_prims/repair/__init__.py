"""Groups that go on after a failure: the survivors form a smaller group, and new ranks join.

>>> import dist_prims
>>> dist_prims.shrink is shrink
True
"""

from .grow import grow as grow
from .grow import join as join
from .reconfigure import reconfigure_handle as reconfigure_handle
from .reconfigure import reconfigured_backend as reconfigured_backend
from .shrink import shrink as shrink
from .shrink import shrink_backend as shrink_backend

__all__ = ["grow", "join", "shrink"]
