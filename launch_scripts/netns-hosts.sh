#!/usr/bin/env bash
# A cluster on one machine: HOSTS network namespaces, each joined to one switch by a link of RATE (10gbit, 200mbit, none), and
# RANKS ranks of a command on each. RATE may be several words: "100mbit 1gbit" gives host 0 a slow link, and the others 1gbit:
#     ./launch_scripts/netns-hosts.sh HOSTS RANKS RATE [--torchrun | --mpirun | --each | --login] -- command [args]
#     ./launch_scripts/netns-hosts.sh 2 2 1gbit -- python program.py
# --each starts the command once on each host, with HOST=0, 1, ...; --login once, beside the hosts, where "ssh host1 ..."
# reaches them. FAMILIES="4 6 46" gives host 0 an IPv4 address, host 1 an IPv6 address and host 2 both; the hosts after
# the last word have the last one; by default all have IPv4. The links of a cluster that was started with NAME=box can be
# cut, mended and slowed while it runs, and drop larger packets:
#     ./launch_scripts/netns-hosts.sh --cut box 1        --mend box 1        --slow box 1 20mbit        --limit box 1 1400
# The status is the command's, of the host that failed first; the others then have GRACE (10) seconds to end by
# themselves. It is 124 after TIMEOUT (600) seconds. Without root, the kernel must let users make namespaces.
#
# There is nothing to clean up, not even after kill -9: processes and links live in namespaces that the kernel takes
# down with the first process in them (netns-inside.sh), and that one dies with this script.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
user=() # what unshare needs to make namespaces without root
[ "$(id -u)" = 0 ] || user=(--user --map-root-user)

main() { # HOSTS RANKS RATE [how] -- command
    local hosts=${1:-} ranks=${2:-} rate=${3:-} how=--torchrun needed=mpirun name=${NAME:-box$$} from=$PWD rates each
    [[ $hosts =~ ^[1-9][0-9]?$ ]] || fail "HOSTS is '$hosts'; give a number from 1 to 99 (usage: see the head of $0)"
    [[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "RANKS is '$ranks'; give the number of ranks on each host, 1 or more"
    read -ra rates <<<"$rate"
    for each in "${rates[@]:-}"; do check_rate "$each"; done
    shift 3
    [[ ${1:-} == -- || $# == 0 ]] || { how=$1 && shift; }
    [[ $how =~ ^--(torchrun|mpirun|each|login)$ && ${1:-} == -- && $# -ge 2 ]] ||
        fail "after RATE come --torchrun, --mpirun, --each, --login or nothing, and then -- command"
    [[ ${TIMEOUT:=600} =~ ^[1-9][0-9]*$ ]] || fail "TIMEOUT is '$TIMEOUT'; give seconds"
    [[ ${GRACE:=10} =~ ^[0-9]+$ ]] || fail "GRACE is '$GRACE'; give seconds"
    [[ ${FAMILIES:=4} =~ ^(4|6|46)(\ (4|6|46))*$ ]] || fail "FAMILIES is '$FAMILIES'; give 4, 6 or 46 for each host"
    [[ $name =~ ^[A-Za-z0-9_-]+$ ]] || fail "NAME is '$name'; give letters, digits, - and _"
    [[ -z $(find_box "$name") ]] || fail "a cluster named $name is running; give another NAME"
    unshare "${user[@]}" --net true 2>/dev/null || fail "no namespace may be made here: be root, or let users make them"
    [[ $how == --mpirun ]] || needed=torchrun # an environment with an mpirun of its own may lack torchrun
    command -v "$needed" >/dev/null || { . "$here/setup.sh" && cd "$from"; }
    [[ $how != --mpirun || $(mpirun --version 2>/dev/null) =~ HYDRA|Open\ MPI ]] ||
        fail "--mpirun needs the mpirun of MPICH or Open MPI on the PATH"
    export TIMEOUT GRACE FAMILIES
    trap 'kill -KILL $(jobs -p) 2>/dev/null || true' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    set -m # or the ranks would be deaf to SIGINT, as what a script starts in the background is
    setpriv --pdeathsig KILL unshare "${user[@]}" --net --uts --mount --pid --fork --kill-child --mount-proc \
        bash "$here/netns-inside.sh" cluster "$name" "$hosts" "$ranks" "$rate" "$how" "${@:2}" </dev/null &
    wait $!
}

fault() { # --cut | --mend | --slow | --limit NAME HOST [RATE | BYTES]
    local box enter=(nsenter --net --mount)
    [[ $# -ge 3 && $3 =~ ^[0-9]+$ ]] || fail "give $1 NAME HOST, the host as a number from 0"
    box=$(find_box "$2")
    [[ -n $box ]] || fail "no cluster named '$2' is running"
    [ ${#user[@]} = 0 ] || enter+=(--user --preserve-credentials)
    case $1 in
        --cut) "${enter[@]}" --target "$box" ip link set "host$3" down ;;
        --limit) "${enter[@]}" --target "$box" ip link set "host$3" mtu "${4:-}" ;;
        --mend) "${enter[@]}" --target "$box" ip link set "host$3" up ;;
        --slow) check_rate "${4:-}" && "${enter[@]}" --target "$box" bash "$here/netns-inside.sh" shape "host$3" "$4" ;;
    esac
}

fail() { echo "netns-hosts: $*" >&2 && exit 2; }

check_rate() { [[ $1 =~ ^(none|[1-9][0-9]*[kmg]bit)$ ]] || fail "RATE is '$1'; give 10gbit, 200mbit, 500kbit or none"; }

find_box() { pgrep -o -f "^bash .*netns-inside.sh cluster $1 " || true; }

for tool in ip tc unshare nsenter setpriv pgrep sysctl; do
    command -v $tool >/dev/null ||
        fail "there is no '$tool'; install iproute2, util-linux and procps (Debian: apt install iproute2 procps)"
done
case ${1:-} in
    --cut | --mend | --slow | --limit) fault "$@" ;;
    *) main "$@" ;;
esac
