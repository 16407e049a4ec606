#!/usr/bin/env bash
# Print how many lines the project has, beside the caps that keep it small enough for a small team. Fails on no excess.
set -euo pipefail
cd "$(dirname "$0")/.."
count() { printf '%7d of %6d lines  %s\n' "$(git ls-files -z -- "${@:3}" | xargs -0 cat | wc -l)" "$1" "$2"; }
count 32500 dist_prims dist_prims
count 16500 "csrc without csrc/tests" csrc ':!csrc/tests'
count 28000 tests tests
count 2500 examples examples
count 4000 tests/helpers tests/helpers
