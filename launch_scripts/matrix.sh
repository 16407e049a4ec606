#!/usr/bin/env bash
# Build and test with other versions of torch: ./launch_scripts/matrix.sh [--tier smoke|default] [TORCH...]
#
# By default the smoke tier with torch 2.11.0, 2.13.0 and 2.15.0; PYTHON=python3.12 names another Python. Each pair has an
# environment of its own in ~/.cache/dist_prims/matrix (XDG_CACHE_HOME), which is kept. A plain torch of PyPI is a build
# for CUDA of up to 5.5 GB. The smoke tier has tests of the backend, collectives, gradients, pipelines, the package: minutes.
# The exit status is 1 if a test fails, and 3 if an environment cannot be made.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
tier=smoke
if [ "${1:-}" = --tier ]; then
    tier=$2
    shift 2
fi
[ $# -gt 0 ] || set -- 2.11.0 2.13.0 2.15.0
python=${PYTHON:-python3}
smoke=(tests/backend/test_backend.py tests/backend/test_torch_adapter.py tests/backend/test_window.py
    tests/repair/test_shrink.py tests/repair/test_shrink_group.py
    tests/repair/test_grow.py tests/repair/test_grow_failures.py tests/repair/test_grow_hosts.py
    tests/repair/test_reconfigure.py tests/repair/test_reconfigure_failures.py tests/repair/test_reconfigure_hosts.py
    tests/collectives/test_collectives.py tests/training/test_gradients.py
    tests/pipeline/test_pipeline.py tests/project/test_package.py)
case $tier in
    smoke) tests=(-n 2 -m "not slow" "${smoke[@]}") ;;
    default) tests=(-n auto -m "not slow") ;;
    *) echo "matrix.sh: --tier is smoke or default, not '$tier'" >&2 && exit 2 ;;
esac
cache=${XDG_CACHE_HOME:-$HOME/.cache}/dist_prims/matrix
name=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])') || exit 3

environment() { # folder, version of torch
    [ -e "$1/ready" ] && cmp -s requirements.lock "$1/ready" && return
    local torch=$2
    [ -x "$1/bin/python" ] || "$python" -m venv "$1" || return
    # torch 2.11 refuses the setuptools of the lock
    { printf '%s\n' "torch==$torch" 'setuptools>=77' && grep -v -e '^torch==' -e '^setuptools==' requirements.lock; } \
        >"$1/requirements" || return
    timeout 1200 "$1/bin/python" -m pip install -q --no-cache-dir --disable-pip-version-check -r "$1/requirements" || return
    cp requirements.lock "$1/ready"
}

status=0
report=
for torch in "$@"; do
    home=$cache/$name-torch$torch
    start=$SECONDS built=
    if ! environment "$home" "$torch"; then
        report+="$name torch $torch: no environment; see above"$'\n'
        [ $status -eq 0 ] && status=3
        continue
    fi
    made=$((SECONDS - start))
    if PATH=$home/bin:$PATH "$home/bin/python" -m pip install -q --disable-pip-version-check --no-build-isolation \
        --no-deps -e . && built=$((SECONDS - start - made)) &&
        PATH=$home/bin:$PATH "$home/bin/python" -m pytest -q "${tests[@]}"; then
        report+="$name torch $torch: passed"
    else
        report+="$name torch $torch: FAILED"
        status=1
    fi
    report+=" (environment $made s, build ${built:-?} s, tests $((SECONDS - start - made - ${built:-0})) s)"$'\n'
done
printf '\n%s' "$report"
exit $status
