#!/usr/bin/env bash
# Print the lines of each part of the project beside its cap. The exit status is 0 even if a part exceeds its cap.
set -euo pipefail
cd "$(dirname "$0")/.."
count() { printf '%7d of %6d lines  %s\n' "$(git ls-files -z -- "${@:3}" | xargs -0 cat | wc -l)" "$1" "$2"; }
count 32500 dist_prims dist_prims
count 16500 "csrc without csrc/tests" csrc ':!csrc/tests'
count 28000 tests tests
count 2500 examples examples
count 4000 tests/helpers tests/helpers
