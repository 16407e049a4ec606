#!/usr/bin/env bash
# Start ranks with the mpirun of the environment, MPICH's or Open MPI's, as root and on few cores, too:
#     ./launch_scripts/mpirun.sh -n 4 python -m dist_prims.demo
# The ranks find each other over MPI; dist_prims.init() needs no address.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
if mpirun --version 2>/dev/null | grep -q "Open MPI\|OpenRTE\|prte"; then # it refuses root, and more ranks than cores
    export OMPI_ALLOW_RUN_AS_ROOT="${OMPI_ALLOW_RUN_AS_ROOT:-1}"
    export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-1}"
    export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}"
fi
exec mpirun "$@"
