#!/usr/bin/env bash
# Start ranks with torchrun and restart all of them when one fails, up to RESTARTS (3) times:
#     RANKS=4 ./launch_scripts/torchrun.sh program.py
# On several hosts, on each: NNODES=2:4 RDZV_ENDPOINT=host:port RDZV_ID=job RANKS=8 ./launch_scripts/torchrun.sh program.py
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ -n "${RDZV_ENDPOINT:-}" ]; then
    where=(--nnodes "${NNODES:-1}" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "${RDZV_ID:-dist_prims}")
else
    where=(--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 --nnodes 1)
fi
exec torchrun "${where[@]}" --nproc-per-node "${RANKS:-4}" --max-restarts "${RESTARTS:-3}" "$@"
