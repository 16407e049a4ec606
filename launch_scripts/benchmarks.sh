#!/usr/bin/env bash
# Run the commands of docs/benchmarks/README.md again: ./launch_scripts/benchmarks.sh [--short] [FOLDER [PART...]]
# FOLDER (build/benchmarks) gets runs.md, which has date, commit, machine, and what each command prints, and the pictures
# of the page. PART is libraries, host, hosts, transports, predicted, training or repair; by default all of them run, for
# hours. --short: small data and few rounds, for minutes, to see that each command runs. If a command fails, the others
# run, and the status is 1. The other libraries are those that `docs/benchmarks/libraries.py --build` has installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
python -c 'import dist_prims' 2>/dev/null || . launch_scripts/setup.sh
short='' failed=''
[ "${1:-}" = --short ] && short=yes && shift
out=${1:-build/benchmarks}
[ $# = 0 ] || shift
parts=" ${*:-libraries host hosts transports predicted training repair} "
mkdir -p "$out"
out=$(cd "$out" && pwd)
export TIMEOUT=7200 # seconds of one command
bench=(python -m dist_prims.bench)

run() { # FEW COMMAND...: FEW are the options of a short run
    local few=$1 began=$SECONDS status=0 load
    shift
    # shellcheck disable=SC2086
    [ -z "$short" ] || set -- "$@" $few
    echo "$*" >&2
    load=$(cut -d' ' -f1 /proc/loadavg)
    timeout $((TIMEOUT + 30)) "$@" >"$out/output" 2>"$out/errors" || status=$?
    [ $status = 0 ] || failed+="$* (status $status): $(tail -n 1 "$out/errors")"$'\n'
    printf '`%s` (%d s, load average before it %s, status %d)\n\n```\n' "$*" $((SECONDS - began)) "$load" $status
    cat "$out/output"
    printf '```\n\n'
}

on() { # "HOSTS RANKS" RATE [--mpirun | --each] FEW OPTIONS...: between namespaces
    local -a cluster
    read -ra cluster <<<"$1 $2"
    shift 2
    case $1 in --mpirun | --each) cluster+=("$1") && shift ;; esac
    local few=$1
    shift
    run "$few" ./launch_scripts/netns-hosts.sh "${cluster[@]}" -- "${bench[@]}" "$@"
}

libraries() {
    run "--rounds 1 --sizes 8,64K" python docs/benchmarks/libraries.py --ranks 2 --rounds 3 \
        --json "$out/libraries.json" --plot "$out/libraries.svg"
}

host() {
    local few="--sizes 8,64K --iterations 2"
    for ranks in 2 4; do run "$few" "${bench[@]}" --ranks $ranks --algorithms none --limits; done
    for collective in reduce_scatter all_gather broadcast reduce all_to_all; do
        run "$few" "${bench[@]}" --ranks 2 --collective $collective --algorithms none --sizes 8,4K,64K,1M,16M
    done
    run "$few" "${bench[@]}" --ranks 4 --plot "$out/all_reduce.svg"
}

hosts() {
    local few="--sizes 64 --iterations 1"
    for topology in "2 2" "4 1" "3 2"; do
        on "$topology" 1gbit "$few" hosts --sizes 64K,1M,16M --iterations 5
        on "$topology" 1gbit "$few" hosts --sizes 4,4K --iterations 5
        on "$topology" 100mbit "$few" hosts --sizes 4,4K,64K,16M --iterations 5
    done
    run "--bytes 64K --rounds 1" ./launch_scripts/netns-hosts.sh 4 2 "100mbit 1gbit" -- python docs/benchmarks/slow_host.py
    for rate in 10gbit none; do on "2 2" $rate "$few" hosts --sizes 1M,16M,32M; done
}

transports() {
    local few="--sizes 64 --iterations 1"
    on "2 2" 1gbit --mpirun "$few" hosts --transports tcp,mpi
    for topology in "2 1" "2 2"; do
        on "$topology" none "$few" hosts --collectives round_trip --transports tcp,ucx --sizes 64,64K,1M,16M
    done
    for topology in "2 1" "2 2" "4 1"; do
        # shellcheck disable=SC2086
        run "--blocks 1 --calls 2" env DIST_PRIMS_TRANSPORT=tcp ./launch_scripts/netns-hosts.sh $topology none --mpirun -- \
            python docs/benchmarks/beside_mpi.py barrier ping_pong:8 {broadcast,all_reduce,all_gather,all_to_all}:8 \
            {all_gather,all_to_all}:64K {broadcast,reduce_scatter}:1M
    done
}

predicted() {
    for topology in "2 2" "3 2" "4 1"; do
        on "$topology" 1gbit "--sizes 64K --rounds 1" calibrate --sizes 64K,1M --rounds 5 --output "$out/calibration.json"
    done
}

training() {
    local few="--model resnet18 --batch 4 --image 32 --rounds 1"
    run "--steps 2 --width 32" "${bench[@]}" steps
    run "$few --microbatches 2" "${bench[@]}" pipeline
    run "$few --sweep 1,2" "${bench[@]}" pipeline --sweep 1,2,4,8,16 --pictures "$out"
    for topology in "2 2" "3 2" "4 1"; do
        on "$topology" 1gbit "--steps 2 --width 32" steps --what ddp --steps 7 --width 512
    done
}

repair() {
    for of in "2 1" "4 1" "8 1" "4 2" "4 4"; do
        run "--rounds 1" "${bench[@]}" repair --ranks "${of% *}" --hosts "${of#* }" --rounds 50
    done
    on "2 1" 1gbit "--rounds 1" repair --ranks 4
}

for part in $parts; do
    [ "$(type -t "$part")" = function ] || { echo "there is no part $part (usage: see the head of $0)" >&2 && exit 2; }
done
{
    printf '# Benchmarks\n\n- date: %s\n- commit: %s\n' "$(date -u '+%F %R UTC')" "$(git describe --always --dirty || echo unknown)"
    printf -- '- machine: %s cores,%s, Linux %s\n' "$(env -u OMP_NUM_THREADS nproc)" "$(grep -m 1 'model name' /proc/cpuinfo | cut -d: -f2)" "$(uname -r)"
    printf -- '- versions: %s\n\n' "$(python -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__)')"
    for part in $parts; do
        printf '## %s\n\n' "$part"
        "$part"
    done
} >"$out/runs.md"
rm -f "$out/output" "$out/errors"
echo "$out/runs.md"
[ -z "$failed" ] || { echo "failed:"$'\n'"$failed" >&2 && exit 1; }
