"""Joining of the default group under any launcher (torchrun, mpirun, srun, a URL, none), and ``spawn``."""

from ..rendezvous.detect_launcher import Launcher as Launcher
from ..rendezvous.detect_launcher import detect as detect
from ..rendezvous.hosts import Placement
from ..rendezvous.hosts import host_id as host_id
from .join import init
from .spawn import spawn
from .spawn_parent import RankFailedError

__all__ = ["Placement", "RankFailedError", "init", "spawn"]
