#!/usr/bin/env bash
# The inner half of netns-hosts.sh: makes the hosts and their links, starts the ranks, and waits for them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# The first process of the cluster. Its own network namespace is the switch.
cluster() { # NAME HOSTS RANKS RATE how command
    local how=$5 host list="" launcher=() command rates=($4) families=($FAMILIES)
    export HOSTS=$2 RANKS=$3 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    mount -t tmpfs tmpfs /var/run # where ip keeps the namespaces; not seen outside
    # Open MPI names shared memory, and its daemons their folders, by process numbers, which are the same in each cluster.
    mount -t tmpfs tmpfs /dev/shm
    # torch looks up the names of callers, which appear as ::ffff:ADDRESS; without a line that is a query to a name server
    printf '%s\n' "127.0.0.1 localhost" "::ffff:127.0.0.1 localhost.mapped" "::1 localhost" "10.0.0.254 switch" >/var/run/hosts
    mount --bind /var/run/hosts /etc/hosts
    mkdir /var/run/bin
    printf '#!/bin/sh\nexec bash "%s" ssh "$@"\n' "$here/netns-inside.sh" >/var/run/bin/ssh
    chmod +x /var/run/bin/ssh
    hostname switch
    ip link add switch mtu 9000 type bridge
    ip address add 10.0.0.254/24 dev switch
    ip link set switch up
    for ((host = 0; host < HOSTS; host++)); do
        add_host "host$host" "$((host + 1))" "${rates[host < ${#rates[@]} ? host : -1]}" "${families[host < ${#families[@]} ? host : -1]}"
        list+=${list:+,}host$host
    done
    shift 5
    case $how in
        --login) PATH=/var/run/bin:$PATH "$@" & ;;
        --mpirun) start_by_mpirun "$list" "$@" & ;;
        --torchrun | --each) for ((host = 0; host < HOSTS; host++)); do
            [[ $how == --each ]] || launcher=(torchrun --nnodes "$HOSTS" --nproc-per-node "$RANKS" --node-rank "$host"
                --master-addr host0 --master-port 29500 --no-python)
            command=("${launcher[@]}" "$@")
            HOST=$host ssh "host$host" "${command[*]@Q}" &
        done ;;
    esac
    await_all "$(jobs -p)"
}

start_by_mpirun() { # HOSTS command: MPICH's or Open MPI's, which refuses root and more ranks than cores
    local remote_shell=/var/run/bin/ssh
    if [[ $(mpirun --version) == *HYDRA* ]]; then
        exec mpirun -launcher ssh -launcher-exec "$remote_shell" -localhost switch -hosts "$1" \
            -ppn "$RANKS" -n $((HOSTS * RANKS)) "${@:2}"
    fi
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_MCA_plm_ssh_agent=$remote_shell
    export TMPDIR=/var/run/tmp
    mkdir "$TMPDIR"
    exec mpirun --host "${1//,/:$RANKS,}:$RANKS" --map-by "ppr:$RANKS:node:OVERSUBSCRIBE" -n $((HOSTS * RANKS)) "${@:2}"
}

add_host() { # NAME NUMBER RATE FAMILIES
    ip netns add "$1"
    ip link add "$1" mtu 9000 type veth peer name eth0 mtu 9000 netns "$1"
    ip link set "$1" master switch up
    ip -n "$1" link set eth0 up
    ip -n "$1" link set lo up
    ip netns exec "$1" sysctl -qw net.ipv4.tcp_congestion_control=reno # which every kernel has
    shape "$1" "$3"
    if [[ $4 == *4* ]]; then
        ip -n "$1" address add "10.0.0.$2/24" dev eth0
        printf '%s\n' "10.0.0.$2 $1" "::ffff:10.0.0.$2 $1.mapped" >>/var/run/hosts
    fi
    if [[ $4 == *6* ]]; then
        ip -n "$1" address add "fd00::$2/64" dev eth0 nodad
        echo "fd00::$2 $1" >>/var/run/hosts
    fi
}

# Both directions of a host's link. A burst passes at once: if it is long, small transfers travel free; if it is shorter
# than timers are late (hence 100 us, and 150 above 1 Gbit/s), large ones do not reach the rate. Packets longer than a
# burst are cut into frames, so frames have the 9000 bytes that clusters give them: those of 1500 cost too much here. The
# queue holds 5 ms.
shape() { # HOST RATE
    local bits=$2 burst limit arguments
    tc qdisc del dev "$1" root 2>/dev/null || true
    ip netns exec "$1" tc qdisc del dev eth0 root 2>/dev/null || true
    [[ $2 != none ]] || return 0
    bits=${bits/kbit/000} bits=${bits/mbit/000000} bits=${bits/gbit/000000000}
    burst=$((bits / 8 * (bits > 1000000000 ? 150 : 100) / 1000000)) limit=$((bits / 8 * 5 / 1000))
    arguments=(tbf rate "$2" burst $((burst > 12000 ? burst : 12000)) limit $((limit > 256000 ? limit : 256000)))
    tc qdisc add dev "$1" root "${arguments[@]}"
    ip netns exec "$1" tc qdisc add dev eth0 root "${arguments[@]}"
}

ssh() { # [options] HOST command: processes of a host have its name, and do not see those of others
    while [[ $1 == -* ]]; do shift; done
    if [[ ${TMPDIR:-} == /var/run/tmp ]]; then
        TMPDIR+=/$1
        mkdir -p "$TMPDIR"
    fi
    exec ip netns exec "$1" unshare --uts --ipc --pid --fork --kill-child --mount-proc bash -c "hostname $1; ${*:2}"
}

await_all() { # processes: until all have ended, or, when one has failed, for GRACE seconds more
    local left=$1 ended code status=0 alarm
    sleep "$TIMEOUT" &
    alarm=$!
    while [[ $left == *[0-9]* ]]; do
        code=0
        wait -n -p ended $left "$alarm" || code=$?
        if ((ended == alarm)); then
            ((status)) || echo "netns-hosts: not over after TIMEOUT=$TIMEOUT s" >&2
            exit $((status ? status : 124))
        elif ((code && !status)); then
            status=$code
            sleep "$GRACE" &
            alarm=$!
        fi
        left=$(grep -vx "$ended" <<<"$left" || true)
    done
    exit "$status"
}

"$@"
