#!/usr/bin/env bash
# Build the documentation site, build/site/index.html; warnings are errors: ./launch_scripts/docs.sh [--linkcheck] [FOLDER]
# --linkcheck requests every external link instead, which needs a network. FOLDER takes the place of build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
python -c 'import dist_prims, furo, myst_parser' 2>/dev/null || . launch_scripts/setup.sh
builder=html output=site
[ "${1:-}" = --linkcheck ] && builder=linkcheck output=linkcheck && shift
build=${1:-build}
# The sources of the site have the paths of the repository, so that a link is the same there and on GitHub.
sources=$build/site_sources
mkdir -p "$sources"
rm -rf "$sources"/{docs,launch_scripts,examples}
for path in CONTRIBUTING.md CHANGELOG.md docs launch_scripts examples; do
    [ ! -e "$path" ] || cp -Rp "$path" "$sources"
done
cp -p README.md "$sources/index.md"
exec python -m sphinx -q -W --keep-going -b "$builder" -c docs -d "$build/doctrees" "$sources" "$build/$output"
