#!/usr/bin/env bash
# A throwaway Slurm cluster of two nodes on this one machine, to run the job files for real. As root:
#
#   vars=$(bash tests/slurm_cluster.sh up [FOLDER]) && eval "$vars"    # exports SLURM_CONF and CLUSTER (the folder)
#   sbatch ...; squeue; scontrol show job ...
#   bash tests/slurm_cluster.sh down "$CLUSTER"
#
# Each node is a network namespace with its own address, hostname and /etc/hosts, so that n1 and n2 are two hosts
# to torchrun and gloo. The GPUs are fake: Slurm counts them and sets CUDA_VISIBLE_DEVICES, nothing more.
# GPUS=8 gives each node 8 instead of 4. LOOPBACK=1 does without namespaces, as happens by itself where they
# cannot be made: n1 and n2 are then two names of this machine, put into /etc/hosts.
set -euo pipefail

say() { echo "slurm_cluster: $*" >&2; }

start() { # NAME COMMAND...: the child notes its pid itself, so no daemon is lost if this script is killed meanwhile
    # shellcheck disable=SC2016
    setsid sh -c 'echo $$ >"$0"; exec "$@"' "$dir/pid/$1" "${@:2}" >"$dir/log/$1.out" 2>&1 </dev/null &
}

pids() { # what still runs of this cluster: its daemons, and everything in its namespaces
    local pid n
    for pid in $({ cat "$dir"/pid/* || true; } 2>/dev/null); do
        # The number may be another program's by now; all of ours name a file of this folder.
        if grep -qsF "$dir/" "/proc/$pid/cmdline"; then echo "$pid"; fi
    done
    for n in n1 n2; do ip netns pids "$net-$n" 2>/dev/null || true; done
}

down() {
    [ -e "$dir/net" ] || return 0
    local n net
    net=$(cat "$dir/net")
    export SLURM_CONF=$dir/slurm.conf
    if [ "$net" = loopback ]; then # only Slurm knows the jobs' processes
        for n in n1 n2; do scontrol listpids '*' $n 2>/dev/null | awk 'NR > 1 && $1 > 1 { print $1 }'; done |
            xargs -r kill -KILL 2>/dev/null || true
        timeout 5 scancel --quiet --user=root 2>/dev/null || true
        for n in {1..20}; do [ -n "$(timeout 5 squeue -h 2>/dev/null)" ] || break; sleep 0.5; done
        sed -i "\|# $dir\$|d" /etc/hosts
    fi
    for n in TERM KILL KILL; do
        pids | xargs -r kill -$n 2>/dev/null || true
        for _ in {1..20}; do [ -n "$(pids)" ] || break 2; sleep 0.1; done
    done
    for n in n1 n2; do ip netns del "$net-$n" 2>/dev/null || true; done
    ip link del "$net" 2>/dev/null || true
    rm -rf "$dir"
}

networks() { # a bridge with this machine at .254, n1 at .1 and n2 at .2 of a range kept for network tests (RFC 2544)
    local i n
    for i in {1..253}; do
        ip link add "slurm$i" type bridge 2>/dev/null || continue # taking the name takes the number
        echo "slurm$i" >"$dir/net"
        break
    done
    net=$(cat "$dir/net") addr=(198.18."$i".{254,1,2}) port=(6817 6818 6818)
    ip addr add "${addr[0]}/24" dev "$net"
    ip link set "$net" up
    for n in 1 2; do
        ip netns add "$net-n$n"
        ip link add "$net-n$n" type veth peer name eth0 netns "$net-n$n"
        ip link set "$net-n$n" master "$net" up
        ip -n "$net-n$n" addr add "${addr[n]}/24" dev eth0
        ip -n "$net-n$n" link set eth0 up
        ip -n "$net-n$n" link set lo up
    done
    printf '%s\n' '127.0.0.1 localhost' "${addr[1]} n1" "${addr[2]} n2" >"$dir/hosts"
}

loopback() {
    say 'no network namespaces here: n1 and n2 are names of this machine in /etc/hosts'
    echo loopback >"$dir/net"
    net=loopback addr=(127.0.0.1 127.0.0.1 127.0.0.1)
    local p=$((20000 + RANDOM % 10000)) own
    while ss -Hltn "sport >= :$p and sport <= :$((p + 2))" | grep -q .; do p=$((p + 3)); done
    port=("$p" $((p + 1)) $((p + 2)))
    # torchrun starts its rendezvous store on the node whose own name and the endpoint's name have one address.
    own=$(getent ahostsv4 "$(uname -n)" | awk '{ print $1; exit }')
    printf '%s n%d # %s\n' "${own:-127.0.0.1}" 1 "$dir" "${own:-127.0.0.1}" 2 "$dir" >>/etc/hosts
}

configure() { # one line of slurm.conf per reason; the rest is Slurm's own default
    local host
    host=$(uname -n)
    mkdir -p "$dir"/{dev,spool,state}
    for n in $(seq 0 $((gpus - 1))); do mknod "$dir/dev/gpu$n" c 1 3; done
    echo "NodeName=n[1-2] Name=gpu File=$dir/dev/gpu[0-$((gpus - 1))]" >"$dir/gres.conf"
    cat >"$dir/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=${host%%.*}(${addr[0]})
SlurmctldPort=${port[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it may start again (120 s by default)
AuthInfo=socket=$dir/munge.socket,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/state/pid
SlurmdPidFile=$dir/spool/%n.pid
SlurmctldLogFile=$dir/log/slurmctld
SlurmdLogFile=$dir/log/%n
CommunicationParameters=NoCtldInAddrAny$bind
ReturnToService=2
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
# CPUs and memory that the machine need not have
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SchedulerParameters=sched_interval=2,sched_min_interval=0,batch_sched_delay=0,bf_interval=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
InactiveLimit=0
OverTimeLimit=0
KillWait=30
MinJobAge=600
NodeName=n1 NodeAddr=${addr[1]} Port=${port[1]} CPUs=64 RealMemory=500000 Gres=gpu:$gpus $names
NodeName=n2 NodeAddr=${addr[2]} Port=${port[2]} CPUs=64 RealMemory=500000 Gres=gpu:$gpus $names
PartitionName=main Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=30
# a job here takes the GPUs of those in main, which are requeued
PartitionName=urgent Nodes=n1,n2 PriorityTier=2
CONF
}

up() {
    local n gpus=${GPUS:-4} addr port net names= bind=
    dir=$(realpath -m "${1:-$(mktemp -d -t slurm_cluster.XXXXXX)}")
    say "folder $dir"
    mkdir -p "$dir"
    [ -z "$(ls -A "$dir")" ] || { say "$dir is not empty"; exit 1; }
    echo none >"$dir/net"
    trap 'n=$?; tail -n 20 "$dir"/log/* >&2 || true; down; exit $((n ? n : 1))' EXIT
    chmod 755 "$dir"
    mkdir "$dir"/{log,pid}
    if [ -z "${LOOPBACK:-}" ] && unshare --net --uts --mount ip link add try type bridge 2>/dev/null; then
        networks
    else
        loopback
        names=NodeHostname=$(uname -n) bind=,NoInAddrAny
    fi
    configure
    (umask 077 && head -c 128 /dev/urandom >"$dir/munge.key")
    start munged munged --foreground --force --num-threads=2 --key-file="$dir/munge.key" --socket="$dir/munge.socket" \
        --pid-file="$dir/munge.pid" --seed-file="$dir/munge.seed" --log-file="$dir/log/munge"
    for n in {1..50}; do [ ! -S "$dir/munge.socket" ] || break; sleep 0.1; done
    start slurmctld slurmctld -D -f "$dir/slurm.conf"
    for n in n1 n2; do
        if [ "$net" = loopback ]; then
            start $n slurmd -D -f "$dir/slurm.conf" -N $n
        else
            # shellcheck disable=SC2016
            start $n ip netns exec "$net-$n" unshare --uts sh -c \
                'hostname "$1" && mount --bind "$0/hosts" /etc/hosts && exec slurmd -D -f "$0/slurm.conf" -N "$1"' "$dir" $n
        fi
    done
    export SLURM_CONF=$dir/slurm.conf
    for n in {1..120}; do
        [ "$(timeout 5 sinfo -h -N -p main -t idle -o %T 2>/dev/null | grep -cx idle)" != 2 ] || break
        [ "$n" != 120 ] || { say 'the nodes did not become idle within a minute'; exit 1; }
        sleep 0.5
    done
    trap - EXIT
    printf 'export SLURM_CONF=%q CLUSTER=%q\n' "$SLURM_CONF" "$dir"
}

[ "$(id -u)" = 0 ] || { say 'needs root'; exit 3; }
for need in munged:munge slurmctld:slurm-wlm slurmd:slurm-wlm srun:slurm-wlm ip:iproute2; do
    command -v "${need%:*}" >/dev/null || { say "${need%:*} is missing: install the package ${need#*:}"; exit 3; }
done
case ${1:-} in
up) up "${2:-}" ;;
down) dir=$(realpath -m "${2:?which folder?}"); down ;;
*) say 'usage: slurm_cluster.sh up [FOLDER] | down FOLDER'; exit 2 ;;
esac
