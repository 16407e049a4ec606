#!/usr/bin/env bash
# Make the environment, build, and run the main job on 4 ranks of this machine.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec mpirun -n 4 python -m dist_prims.demo "$@"
