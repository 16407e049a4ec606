"""Joining of the default group under any launcher (torchrun, mpirun, srun, a URL, none), and :func:`spawn`."""

from .detect import Launcher, detect
from .hosts import Placement, host_id
from .join import init
from .spawn import RankFailed, spawn

__all__ = ["Launcher", "Placement", "RankFailed", "detect", "host_id", "init", "spawn"]
