# Sourced by demo.sh and test.sh: makes the environment .venv and installs the package into it, once for each state of
# the lock and the build files. Torch is in the environment when the package is built: an isolated build would download
# a second one.

dist_prims_setup() {
    local root python stamp state tool
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    python=${PYTHON:-python3}
    if ! command -v "$python" >/dev/null || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "dist_prims: Python 3.10 or later is needed as '$python'. Install python3 (Debian: apt install python3" \
            "python3-venv), or name another: PYTHON=/path/to/python3 $0" >&2
        return 1
    fi
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        echo "dist_prims: '$python' has no venv module. Install it (Debian: apt install python3-venv)" >&2
        return 1
    fi
    tool=${CXX:-c++}
    if ! echo 'int main() { return 0; }' | "$tool" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
        echo "dist_prims: '$tool' is no C++20 compiler. Install g++ 10 or later (Debian: apt install g++)," \
            "or name another: CXX=/path/to/compiler $0" >&2
        return 1
    fi
    stamp=$root/.venv/.dist_prims
    state=$(cd "$root" && {
        echo "$root" "${DIST_PRIMS_MPICC:-}"
        find requirements.lock setup.py pyproject.toml dist_prims/backend/compile_native.py csrc -type f -print0 | LC_ALL=C sort -z | xargs -0 cat
    } | cksum)
    if [ ! -e "$stamp" ] || [ "$(cat "$stamp")" != "$state" ]; then
        echo "dist_prims: making the environment in $root/.venv (a few minutes)" >&2
        [ -x "$root/.venv/bin/python" ] || "$python" -m venv "$root/.venv" || return 1
        "$root/.venv/bin/python" -m pip install -q --disable-pip-version-check -r "$root/requirements.lock" || return 1
        "$root/.venv/bin/python" -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps \
            -e "$root" || return 1
        echo "$state" >"$stamp"
    fi
    export PATH="$root/.venv/bin:$PATH"
    cd "$root" || return 1
}

dist_prims_setup
