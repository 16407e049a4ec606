#!/usr/bin/env bash
# Make the environment, build, and run the test suite: ./launch_scripts/test.sh [pytest arguments]
# Without -m the tests marked slow are left out; -m slow runs them alone.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
case " $* " in
    *" -m "*) exec python -m pytest -n auto "$@" ;;
    *) exec python -m pytest -n auto -m "not slow" "$@" ;;
esac
