"""Joining of the default group under any launcher (torchrun, mpirun, srun, a URL, none), and ``spawn``."""

from ..rendezvous.detect_launcher import Launcher, detect
from ..rendezvous.hosts import Placement, host_id
from .join import init
from .spawn import spawn
from .spawn_parent import RankFailedError

__all__ = ["Launcher", "Placement", "RankFailedError", "detect", "host_id", "init", "spawn"]
