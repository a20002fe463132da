#!/usr/bin/env bash
# A throwaway Slurm cluster of two nodes on this one machine, to run the job files for real. As root:
#
#   vars=$(bash tests/helpers/slurm_cluster.sh up FOLDER) && eval "$vars"    # exports SLURM_CONF
#   sbatch ...; squeue; scontrol show job ...
#   bash tests/helpers/slurm_cluster.sh down FOLDER
#
# Each node is a network namespace with its own address, hostname and /etc/hosts, so that they are
# two hosts to torchrun and gloo. The four GPUs are fake: Slurm counts them, nothing more.
# As on most clusters, Slurm tracks the processes of a job with cgroups and kills what outlives its
# task (here with the freezer of cgroup v1). Where there is none, it looks for child processes
# instead, which orphans escape. REQUIRE_SLURM makes that an error.
set -euo pipefail

die() { echo "slurm_cluster: $2" >&2; exit "$1"; }

start() { # HOST PROGRAM ARGUMENT...
    # Not `ip netns exec`: it mounts a new /sys, without the cgroups that slurmd looks for.
    # shellcheck disable=SC2016
    local enter=(nsenter --net="/run/netns/$net-$1" unshare --uts --mount sh -c
        'hostname "$0" && mount --bind "$1/hosts" /etc/hosts && shift && exec "$@"' "$1" "$dir")
    # The child notes its pid itself: none goes unnoted if this script is killed meanwhile.
    # shellcheck disable=SC2016
    setsid sh -c 'echo $$ >"$0" && exec "$@"' "$dir/pid/$1.$2" "${enter[@]}" "${@:2}" \
        >"$dir/log/$1.$2" 2>&1 </dev/null &
    disown
}

pids() { # of what still runs of this cluster: its daemons, and everything in its namespaces
    local pid host
    for pid in $({ cat "$dir"/pid/* || true; } 2>/dev/null); do
        # By now the number may be another program's; the command line of ours names this folder.
        if grep -qsF "$dir/" "/proc/$pid/cmdline"; then echo "$pid"; fi
    done
    for host in ctl "${net}n1" "${net}n2"; do ip netns pids "$net-$host" 2>/dev/null || true; done
}

down() {
    [ -e "$dir/net" ] || return 0
    local host net
    net=$(cat "$dir/net")
    for _ in {1..50}; do
        [ -n "$(pids)" ] || break
        pids | xargs -r kill -KILL 2>/dev/null || true
        sleep 0.1
    done
    for host in ctl "${net}n1" "${net}n2"; do
        ip link del "$net-$host" 2>/dev/null || true # with the namespace it would go later
        ip netns del "$net-$host" 2>/dev/null || true
    done
    ip link del "$net" 2>/dev/null || true
    for host in "${net}n1" "${net}n2"; do # a cgroup goes when it is empty, from the leaves up
        find "$freezer/slurm_$host" -depth -type d -exec rmdir {} + 2>/dev/null || true
    done
    rm -rf "$dir"
}

namespaces() { # joined by a bridge, in a range set aside for testing networks (RFC 2544)
    local i=1 n=0 host dev
    # Having the name of the bridge is having the number: clusters that start together do not clash.
    until ip link add "sl$i" type bridge 2>/dev/null; do [ $((++i)) -lt 255 ]; done
    echo "sl$i" >"$dir/net"
    net=sl$i address=("198.18.$i".{1,2,3})
    echo 127.0.0.1 localhost >"$dir/hosts"
    ip addr add "198.18.$i.254/24" dev "$net"
    ip link set "$net" up
    for host in "${net}n1" "${net}n2" ctl; do
        echo "${address[n]} $host" >>"$dir/hosts"
        ip netns add "$net-$host"
        ip link add "$net-$host" type veth peer name eth0 netns "$net-$host"
        ip link set "$net-$host" master "$net" up
        ip -n "$net-$host" addr add "${address[n++]}/24" dev eth0
        for dev in lo eth0; do ip -n "$net-$host" link set $dev up; done
    done
}

up() {
    local proctrack=cgroup address net=none n
    if [ ! -w "$freezer/tasks" ]; then
        [ -z "${REQUIRE_SLURM:-}" ] || die 1 "no cgroup can track processes: $freezer is missing"
        echo "slurm_cluster: no $freezer: orphans of a job escape, which they do on no cluster" >&2
        proctrack=linuxproc
    fi
    [[ $dir =~ ^[A-Za-z0-9/._-]{1,60}$ ]] || die 2 "Slurm cannot keep its files and sockets in $dir"
    mkdir -p "$dir"
    [ -z "$(ls -A "$dir")" ] || die 1 "$dir is not empty"
    echo none >"$dir/net"
    trap 'tail -n 20 "$dir"/log/* >&2 || true; down; exit 1' EXIT
    chmod 755 "$dir"
    mkdir "$dir"/{dev,log,pid,state}
    for n in {0..3}; do mknod "$dir/dev/gpu$n" c 1 3; done
    (umask 077 && head -c 128 /dev/urandom >"$dir/munge.key")
    namespaces
    mkdir -p "$dir/spool/${net}n1" "$dir/spool/${net}n2"
    cat >"$dir/cgroup.conf" <<CONF
CgroupMountpoint=${freezer%/*}
CgroupPlugin=cgroup/v1
CgroupAutomount=no
CONF
    echo "NodeName=${net}n[1-2] Name=gpu File=$dir/dev/gpu[0-3]" >"$dir/gres.conf"
    # cred_expire is also how long a requeued job waits before it starts again: 120 s by default,
    # no less than 5. The machine need not have what its nodes are said to have (config_overrides).
    cat >"$dir/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=ctl(${address[2]})
SlurmctldPort=6817
AuthInfo=socket=$dir/munge.socket,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/state/pid
SlurmdPidFile=$dir/spool/%n/pid
SlurmdLogFile=$dir/log/slurmd.%n
MailProg=/bin/true
ProctrackType=proctrack/$proctrack
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
ReturnToService=2
MinJobAge=600
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs=64 RealMemory=500000 Gres=gpu:4 Port=6818
NodeName=${net}n1 NodeAddr=${address[0]}
NodeName=${net}n2 NodeAddr=${address[1]}
PartitionName=main Nodes=${net}n1,${net}n2 Default=YES
CONF
    start ctl munged --foreground --force --num-threads=2 --key-file="$dir/munge.key" \
        --socket="$dir/munge.socket" --pid-file="$dir/munge.pid" --seed-file="$dir/munge.seed" \
        --log-file="$dir/log/munge"
    until [ -S "$dir/munge.socket" ] || [ "$SECONDS" -gt 100 ]; do sleep 0.1; done
    start ctl slurmctld -D -f "$dir/slurm.conf"
    for n in "${net}n1" "${net}n2"; do start "$n" slurmd -D -f "$dir/slurm.conf" -N "$n"; done
    export SLURM_CONF=$dir/slurm.conf
    until [ "$(timeout 5 sinfo -h -N -p main -o %T 2>/dev/null | grep -cx idle)" = 2 ]; do
        [ "$SECONDS" -lt 300 ] || die 1 'the nodes were not idle within five minutes'
        sleep 0.2
    done
    trap - EXIT
    printf 'export SLURM_CONF=%q\n' "$SLURM_CONF"
}

freezer=/sys/fs/cgroup/freezer
[ "$(id -u)" = 0 ] || die 3 'needs root'
for need in munged:munge slurmctld:slurmctld slurmd:slurmd scontrol:slurm-client ip:iproute2; do
    type "${need%:*}" >/dev/null 2>&1 || die 3 "${need%:*} is missing: install ${need#*:}"
done
unshare --net --uts --mount ip link add try type bridge 2>/dev/null || die 3 'no namespaces here'
case "${1:-} $#" in
'up 2' | 'down 2') dir=$(realpath -m "$2") && "$1" ;;
*) die 2 'usage: slurm_cluster.sh up FOLDER | down FOLDER' ;;
esac
