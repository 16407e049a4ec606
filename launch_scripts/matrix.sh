#!/usr/bin/env bash
# Build and test with other versions of torch: ./launch_scripts/matrix.sh [--tier smoke|default] [TORCH...]
#
# By default the smoke tier with torch 2.11.0, 2.13.0 and the newest; PYTHON=python3.12 names another Python. "newest" is the
# newest version up to 2.15.0 that pip can install here, or that has an environment. Each pair has an environment of its own in
# ~/.cache/dist_prims/matrix (XDG_CACHE_HOME), which is kept. A plain torch of PyPI is a build for CUDA of up to 5.5 GB. The
# smoke tier has tests of the backend, collectives, gradients, pipelines, the package, and all that need a certain torch: minutes.
# The exit status is 1 if a test fails, and 3 if an environment cannot be made.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
tier=smoke
if [ "${1:-}" = --tier ]; then
    tier=$2
    shift 2
fi
[ $# -gt 0 ] || set -- 2.11.0 2.13.0 newest
python=${PYTHON:-python3}
case $tier in
    smoke) tests=(-n 2 --smoke) ;;
    default) tests=(-n auto tests) ;; # named: the limits of what tests may cost hold for the pinned torch
    *) echo "matrix.sh: --tier is smoke or default, not '$tier'" >&2 && exit 2 ;;
esac
cache=${XDG_CACHE_HOME:-$HOME/.cache}/dist_prims/matrix
name=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])') || exit 3

newest_known=2.15.0
newest() {
    {
        "$python" -m pip install --dry-run --ignore-installed --no-deps --disable-pip-version-check "torch<=$newest_known" |
            sed -n 's/.*Would install torch-\([0-9.]*\).*/\1/p'
        ls -d "$cache/$name"-torch*/ready | sed -n 's/.*-torch\([0-9.]*\).ready/\1/p'
    } 2>/dev/null | sort -V | tail -n 1
}

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
    if [ "$torch" = newest ]; then
        torch=$(newest)
        torch=${torch:-$newest_known}
        [ "$torch" = $newest_known ] || report+="torch $newest_known cannot be installed here; the newest is $torch"$'\n'
    fi
    home=$cache/$name-torch$torch
    start=$SECONDS built=
    if ! environment "$home" "$torch"; then
        report+="$name torch $torch: NO ENVIRONMENT, nothing was tested; see above"$'\n'
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
