#!/usr/bin/env bash
# A real Slurm on this machine: slurmctld, slurmd and munge of Debian or Ubuntu, as root, without systemd or cgroups.
#
#   bash tools/local_slurm.sh up [DIR]        start, or complete what is not running; about two seconds, packages included 30
#   bash tools/local_slurm.sh status [DIR]    nodes and jobs; exit status 1 when it is not up
#   bash tools/local_slurm.sh down [DIR]      cancel jobs, stop, remove DIR: nothing is left
#
# Virtual nodes n0, n1, ... of this one host with fake GPUs: what a job sees of Slurm is real, what it computes with is not.
# DIR holds everything, also the log files. Without DIR the cluster is in /tmp/hpcflow-slurm and, where the machine has no
# Slurm of its own, /etc/slurm/slurm.conf points to it; with DIR: export SLURM_CONF=DIR/etc/slurm.conf.
#
#   NODES=17 CPUS=64 GPUS=8 MEM=1000000 (MiB)   of one node; more than the host has is fine
#   PORT=<first port>                           default: the first free range from 20000 on
#   ACCT=1                                      accounting by slurmdbd and a private MariaDB, so that sacct works
set -euo pipefail

say() { echo "local_slurm: $*" >&2; }
die() { say "$*"; exit 1; }
alive() { [[ -s $1 ]] && kill -0 "$(<"$1")" 2>/dev/null; }
slurm() { SLURM_CONF=$dir/etc/slurm.conf timeout 10 "$@"; }       # a client blocks for minutes when slurmctld is gone

command=${1:-}
dir=${2:-/tmp/hpcflow-slurm}
link=/etc/slurm/slurm.conf
[[ -z ${2:-} ]] || link=""
[[ $dir == /* ]] || dir=$PWD/$dir
host=$(hostname -s)

packages() {
    local wanted=(slurmctld slurmd slurm-client munge) program missing=""
    local programs=(slurmctld slurmd sbatch munged)
    if [[ ${ACCT:-0} == 1 ]]; then
        wanted+=(slurmdbd slurm-wlm-mysql-plugin mariadb-server)
        programs+=(slurmdbd mariadbd)
    fi
    for program in "${programs[@]}"; do command -v "$program" >/dev/null || missing=$program; done
    [[ -n $missing ]] || return 0
    command -v apt-get >/dev/null || die "$missing is missing and there is no apt-get; install: ${wanted[*]}"
    say "installing ${wanted[*]}"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${wanted[@]}"; } \
        >"$dir/log/apt.log" 2>&1 || die "apt-get could not install ${wanted[*]}: $(tail -1 "$dir/log/apt.log")"
}

free_port() {                                # the first port of a range in which nothing listens
    local base port
    for ((base = 20000 + $$ % 100 * 100; base < 32000; base += 100)); do
        for ((port = base; port < base + 100; port++)); do
            if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then continue 2; fi
        done
        echo "$base"
        return
    done
    die "no free range of 100 ports below 32000"
}

write_config() {
    local last=$((nodes - 1)) accounting="AccountingStorageType=accounting_storage/none"
    [[ ${ACCT:-0} != 1 ]] || accounting="AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((port + 1))
AccountingStoragePass=$dir/munge/socket"
    # cred_expire: a requeued job waits that long. TmpFS per node: mpi/pmix needs it with several slurmd on one host.
    # bf_interval: heterogeneous jobs are started by the backfill scheduler only.
    cat >"$dir/etc/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
TmpFS=$dir/tmp/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
GresTypes=gpu
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,bf_resolution=1,batch_sched_delay=0,bf_continue,bf_min_age_reserve=0,requeue_delay=1
PriorityType=priority/basic
SlurmctldTimeout=30
SlurmdTimeout=${SLURMD_TIMEOUT:-20}
InactiveLimit=0
MinJobAge=600
KillWait=5
TCPTimeout=5
MessageTimeout=10
BatchStartTimeout=10
CompleteWait=0
JobRequeue=1
JobCompType=jobcomp/filetxt
JobCompLoc=$dir/log/jobcomp.log
$accounting
NodeName=n[0-$last] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 2))-$((port + 2 + last))] CPUs=$cpus Boards=1 SocketsPerBoard=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=$memory Gres=gpu:$gpus State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP
CONF
    echo "NodeName=n[0-$last] Name=gpu File=$dir/gpu/fake[0-$((gpus - 1))]" >"$dir/etc/gres.conf"
}

accounting_up() {
    local try
    if [[ ! -d $dir/db/mysql ]]; then
        mariadb-install-db --no-defaults --user=root --datadir="$dir/db" --auth-root-authentication-method=normal \
            --skip-test-db >"$dir/log/db.log" 2>&1 || die "the data base cannot be made, see $dir/log/db.log"
    fi
    alive "$dir/run/mariadb.pid" || setsid mariadbd --no-defaults --user=root --datadir="$dir/db" --skip-networking \
        --socket="$dir/run/mysql" --pid-file="$dir/run/mariadb.pid" --innodb-buffer-pool-size=64M \
        --innodb-flush-log-at-trx-commit=0 </dev/null >>"$dir/log/db.log" 2>&1 &
    for ((try = 0; try < 300; try++)); do
        mariadb --no-defaults -S "$dir/run/mysql" -uroot -e 'select 1' >/dev/null 2>&1 && break
        sleep 0.1
    done
    (umask 077 && cat >"$dir/etc/slurmdbd.conf") <<CONF
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=$((port + 1))
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct
LogFile=$dir/log/slurmdbd.log
PidFile=$dir/run/slurmdbd.pid
CONF
    alive "$dir/run/slurmdbd.pid" || MYSQL_UNIX_PORT=$dir/run/mysql SLURM_CONF=$dir/etc/slurm.conf slurmdbd
    for ((try = 0; try < 300; try++)); do
        slurm sacctmgr -n list cluster >/dev/null 2>&1 && break
        sleep 0.1
    done
    slurm sacctmgr -i add cluster local >/dev/null 2>&1 || true      # it is there already
}

up() {
    local i end
    (( EUID == 0 )) || die "needs root (daemons of their own, device files)"
    mkdir -p "$dir"/{etc,state,spool,run,log,munge,gpu,tmp,db}
    chmod 755 "$dir" "$dir"/{etc,state,run,log,munge,gpu}
    exec 9>"$dir/lock"
    flock 9
    packages
    if [[ -f $dir/settings ]]; then
        read -r nodes cpus gpus memory port <"$dir/settings"         # a running cluster keeps its shape
    else
        nodes=${NODES:-17} cpus=${CPUS:-64} gpus=${GPUS:-8} memory=${MEM:-1000000} port=${PORT:-$(free_port)}
        echo "$nodes $cpus $gpus $memory $port" >"$dir/settings"
    fi
    # A plain file would be counted, but CUDA_VISIBLE_DEVICES is set for devices only; the number must be the index.
    for ((i = 0; i < gpus; i++)); do [[ -c $dir/gpu/fake$i ]] || mknod "$dir/gpu/fake$i" c 1 3; done
    [[ -s $dir/munge/key ]] || (umask 077 && head -c 128 /dev/urandom >"$dir/munge/key")
    if ! alive "$dir/run/munged.pid"; then
        rm -f -- "$dir"/munge/socket*
        munged --force --num-threads=4 --key-file="$dir/munge/key" --socket="$dir/munge/socket" --seed-file="$dir/munge/seed" \
            --pid-file="$dir/run/munged.pid" --log-file="$dir/log/munged.log" 9>&-
    fi
    write_config
    export SLURM_CONF=$dir/etc/slurm.conf
    [[ ${ACCT:-0} != 1 ]] || accounting_up 9>&-
    alive "$dir/run/slurmctld.pid" || slurmctld 9>&-
    for ((i = 0; i < nodes; i++)); do
        mkdir -p "$dir/spool/n$i" "$dir/tmp/n$i"
        alive "$dir/run/slurmd.n$i.pid" || slurmd -N "n$i" 9>&-
    done
    if [[ -n $link && ! -e $link ]]; then
        mkdir -p "${link%/*}"
        ln -sfn "$SLURM_CONF" "$link"
    fi
    end=$((SECONDS + 40))
    until (( $(slurm sinfo -h -N -t idle,alloc,mix -o %N 2>/dev/null | sort -u | wc -l) == nodes )); do
        (( SECONDS < end )) || { slurm sinfo -N -l >&2; tail -n 5 "$dir"/log/*.log >&2; die "not up after 40 s"; }
        sleep 0.1
    done
    say "up: $nodes nodes of $cpus CPUs and $gpus fake GPUs in $dir"
    echo "export SLURM_CONF=$SLURM_CONF"
}

down() {
    local i pid pids=()
    [[ -d $dir/run ]] || exit 0
    if alive "$dir/run/slurmctld.pid"; then
        slurm scancel --user="$(id -un)" 2>/dev/null || true
        for ((i = 0; i < 100; i++)); do
            [[ -n $(slurm squeue -h 2>/dev/null) ]] || break
            sleep 0.1
        done
    fi
    for pid in "$dir"/run/{slurmd.*,slurmctld,slurmdbd,mariadb,munged}.pid; do     # only daemons that were started here
        if alive "$pid"; then pids+=("$(<"$pid")"); kill "$(<"$pid")" 2>/dev/null || true; fi
    done
    for ((i = 0; i < 100; i++)); do
        kill -0 "${pids[@]}" 2>/dev/null || break
        sleep 0.1
    done
    for pid in "${pids[@]}"; do kill -9 "$pid" 2>/dev/null || true; done
    [[ -z $link || $(readlink "$link" 2>/dev/null) != "$dir/etc/slurm.conf" ]] || rm -f -- "$link"
    rm -rf -- "$dir"
    say "down: $dir is gone"
}

status() {
    alive "$dir/run/slurmctld.pid" || die "not up in $dir; works: bash tools/local_slurm.sh up"
    slurm sinfo -N -o "%N %t %c CPUs %m MiB %G" | sort -uV
    slurm squeue -o "%i %j %T %M %l %D %R"
}

case $command in
    up | down | status) "$command" ;;
    *) die "works: bash tools/local_slurm.sh up|down|status [DIR]" ;;
esac
