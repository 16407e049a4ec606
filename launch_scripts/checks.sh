#!/usr/bin/env bash
# The checks of style and types: the one list that the test suite and pre-commit share.
# ./launch_scripts/checks.sh runs all of them, ./launch_scripts/checks.sh NAME one, --list names them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"

ruff-lint() { ruff check .; }
ruff-format() { ruff format --check .; }
types() { mypy; }
clang-format-csrc() { git ls-files 'csrc/*.cpp' 'csrc/*.h' | xargs -r clang-format --dry-run --Werror; }
shell-syntax() { for script in launch_scripts/*.sh launch_scripts/*.sbatch .ci/run; do bash -n "$script"; done; }

checks=(ruff-lint ruff-format types clang-format-csrc shell-syntax)
case "${1:-all}" in
    --list) printf '%s\n' "${checks[@]}" ;;
    all) for check in "${checks[@]}"; do
        echo "$check"
        "$check"
    done ;;
    *) "$1" ;;
esac
