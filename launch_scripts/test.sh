#!/usr/bin/env bash
# Make the environment, build, and run the test suite: ./launch_scripts/test.sh [--all | --long] [pytest arguments]
#
#   (none)    the default tier: some tests of each kind
#   --all     all tests but those marked long, then the smoke tier with the newest torch
#   --long    the tests marked long, then the smoke tier with each version of torch; --slice MINUTES draws a part of the
#             tests, and leaves the versions out. --seed N repeats random tests and the part.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
status=0
python -m pytest -n auto "$@" || status=$?
case " $* " in
    *" tests/"* | *" -k "* | *" -m "* | *" --slice"*) exit $status ;; # a part of a tier
    *" --all "*) torches=(newest) ;;
    *" --long "*) torches=() ;;
    *) exit $status ;;
esac
# An environment that cannot be made (3) is reported, and no fault of the project.
matrix=0
./launch_scripts/matrix.sh "${torches[@]}" || matrix=$?
[ $matrix -eq 0 ] || [ $matrix -eq 3 ] || [ $status -ne 0 ] || status=1
exit $status
