#!/usr/bin/env bash
# Sets up Python once, then trains on every NeuronCore or GPU of this machine, or in one process on a CPU.
#
#   bash run.sh --backend native                                # a laptop, or all 64 devices of a trn2.48xlarge
#   NGPU=2 bash run.sh --tp 2                                   # two processes
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 bash run.sh --tp 4   # on each node; Slurm: srun --ntasks-per-node=1
#   bash run.sh --test [--slow] [pytest arguments]              # tests; --lint: style
#   bash run.sh --help                                          # the trainer's flags
#
# Environment: NGPU (processes on this node; on Trainium one per logical NeuronCore), NNODES, NODE_RANK,
# MASTER_ADDR, MASTER_PORT, LOG_RANK (local ranks on screen, such as 0,3; the output of all is kept in
# OUTPUT_DIR/logs), MAX_RESTARTS (new attempts after a crash). All arguments go to the trainer unchanged.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
trainer=$here/train_qwen3_trn.py requirements=$here/requirements.txt venv=$here/.venv
neuron=${NEURON_DEVICE_PREFIX:-/dev/neuron} # followed by 0, 1, ...; tests put files elsewhere
trainium=0 minor=10                         # Python 3.10
if [ -e "${neuron}0" ]; then trainium=1 minor=12; fi
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)

say() { echo "[qwen3-trn] $*"; }
die() {
    printf '[qwen3-trn] error: %s\n' "$@" >&2
    exit 2
}
have() { command -v "$1" >/dev/null 2>&1; }

# ---- Python and packages ------------------------------------------------------------------------
new_enough() { "$1" -c "import sys; sys.exit(sys.version_info < (3, $minor))" >/dev/null 2>&1; }

# Holds Python $1 what requirements.txt says? Prints the differences and returns 1 if not, 2 if it holds a package
# that cannot work. Reads metadata only: importing torch would take seconds.
compare() {
    "$1" - "$requirements" "$trainium" "$dev" <<'PY'
import re, sys
from importlib.metadata import PackageNotFoundError, version

requirements, trainium, dev = sys.argv[1], sys.argv[2] == "1", sys.argv[3] == "1"

def installed(name):
    try:
        return str(version(name)).split("+")[0]  # 2.13.0+cpu is 2.13.0
    except PackageNotFoundError:
        return ""

placeholder = "PyPI's placeholder, not the package of the AWS Neuron repository"
xla = "the old XLA package, not the native one (2.13 and newer) of the same name"
refused = [("torch-neuronx", [1, 1], placeholder), ("torch-neuronx", [2, 10], xla),
           ("neuronx-cc", [2, 0], placeholder), ("nki", [0, 1], placeholder)]
for name, first_good, what in refused:
    found = installed(name)
    if found and [int(n) for n in re.findall(r"\d+", found)[:2]] < first_good:
        sys.exit(print(f"[qwen3-trn] error: {name} {found} in {sys.prefix} is {what}; leave this environment, or "
                       f"`{sys.executable} -m pip uninstall {name}`, and start again", file=sys.stderr) or 2)

pin = re.compile(r'(#trainium )?([\w-]+)==([\w.]+?)(\.\*)?(?:; python_version (<|>=) "3\.(\d+)")?(\s|$)')
differences = []
for spec in filter(None, map(pin.match, open(requirements))):
    on_trainium, name, want, any_patch, relation, minor, _ = spec.groups()
    if (on_trainium and not trainium) or (name in ("pytest", "pytest-xdist", "ruff") and not dev):
        continue
    if relation and (sys.version_info.minor < int(minor)) != (relation == "<"):
        continue
    found = installed(name)
    if found != want and not (any_patch and found.startswith(want + ".")):
        differences.append(f"{name} {found or 'missing'} (wanted {want})")
if installed("kernels"):  # transformers would import this project's kernels.py in its place
    differences.append("the package kernels, whose name is also that of a file here")
print(", ".join(differences))
sys.exit(bool(differences))
PY
}

# Prints the first Python that is new enough and can make a virtual environment.
base_python() {
    local name found=none
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        if ! new_enough "$name"; then
            if [ "$found" = none ] && have "$name"; then found=$("$name" -V 2>&1 || true); fi
        elif "$name" -c "import venv, ensurepip" >/dev/null 2>&1; then
            echo "$name" && return
        else
            found="$("$name" -V) without ensurepip (on Debian and Ubuntu: sudo apt install python3-venv)"
        fi
    done
    if [ "$trainium" = 1 ]; then
        die "Trainium needs Python 3.12 to 3.14, torch-neuronx 2.14 has no other wheels; found: $found"
    fi
    die "Python 3.$minor or newer, able to make a virtual environment, is needed; found: $found"
}

# Makes or updates .venv. The stamp is written last, so an interrupted installation is done again.
install() {
    local base beat code=0 trainium_packages=() stamp=$venv/.installed wanted
    wanted="$(cksum <"$requirements") trainium=$trainium"
    if new_enough "$venv/bin/python" && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 || ! new_enough "$venv/bin/python"; then
        base=$(base_python) || exit
        say "making $venv with $("$base" -V)"
        "$base" -m venv --clear "$venv" || exit 2
    fi
    rm -f "$stamp"
    say "installing requirements.txt into $venv; once, some minutes"
    if [ "$trainium" = 1 ]; then
        sed -n 's/^#trainium //p' "$requirements" >"$venv/trainium.txt"
        trainium_packages=(--extra-index-url https://pip.repos.neuron.amazonaws.com -r "$venv/trainium.txt")
    elif [ "$(uname)" = Linux ] && ! have nvidia-smi && [ -z "${PIP_INDEX_URL-}${PIP_EXTRA_INDEX_URL-}${PIP_FIND_LINKS-}" ]; then
        say "PyPI's torch for Linux brings gigabytes of CUDA libraries. Without a GPU, better stop this and first set"
        say "PIP_EXTRA_INDEX_URL to the address that pytorch.org (Get Started, Linux, Pip, CPU) gives after --index-url"
    fi
    set -m # a process group, so that the sleep ends with its loop
    (while sleep 30 && kill -0 $$ 2>/dev/null; do say "still installing, $SECONDS s"; done) &
    beat=$!
    set +m
    PIP_USER=0 "$venv/bin/python" -m pip install --disable-pip-version-check \
        -r "$requirements" ${trainium_packages[@]+"${trainium_packages[@]}"} || code=$?
    { kill -- "-$beat" && wait "$beat"; } 2>/dev/null || true
    [ "$code" = 0 ] || die "the installation failed, see pip's message above; run.sh will try again"
    echo "$wanted" >"$stamp"
}

# Sets $python: the active environment if it holds everything, else .venv.
choose_python() {
    local name code difference=""
    for name in python3 python; do
        if [ "${VIRTUAL_ENV-}" = "$venv" ] || ! new_enough "$name"; then continue; fi
        code=0
        difference=$(compare "$name") || code=$?
        if [ "$code" = 2 ]; then exit 2; fi
        if [ "$code" = 0 ]; then
            python=$name
            return
        fi
    done
    if [ -n "${VIRTUAL_ENV-}${CONDA_PREFIX-}" ] && [ -n "$difference" ]; then
        say "the active environment is not used: $difference"
    fi
    ( # of two run.sh at once the second waits, then finds the work done (without flock, as on macOS: start one first)
        if have flock; then flock -n 9 || { say "waiting for another run.sh that installs" && flock 9; }; fi
        install
    ) 9>"$here/.venv.lock" || exit
    python=$venv/bin/python code=0
    compare "$python" >/dev/null || code=$?
    if [ "$code" = 2 ]; then exit 2; fi
}

dev=0
case ${1-} in --test | --lint) dev=1 ;; esac
choose_python

if [ "${1-}" = --lint ]; then
    cd "$here"
    "$python" -m ruff check .
    exec "$python" -m ruff format --check .
elif [ "${1-}" = --test ]; then
    cd "$here"
    workers=$((cores < 4 ? cores : 4)) # each holds a torch and may start four ranks
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores / workers))}"
    exec "$python" -m pytest -n "$workers" test_train.py "${@:2}"
fi

# ---- Neuron runtime; values that you set win ----------------------------------------------------
default() { export "$1=${!1:-$2}"; }
if [ "$trainium" = 1 ]; then
    # Two physical cores make one device. Unset, NKI compiles for one and the compiler for two: NCC_EVRF066.
    default NEURON_LOGICAL_NC_CONFIG 2
    # Otherwise in the temp folder: lost at the next restart, and compiling again takes minutes.
    default TORCH_NEURONX_NEFF_CACHE_DIR "${XDG_CACHE_HOME:-${HOME:-/var/tmp}/.cache}/qwen3-trn/neff"
    # Ranks wait in a collective while another one still compiles, 50 minutes for a very large graph.
    default PG_TIMEOUT_MINUTES 90
    # The same wait inside the runtime, in seconds; its own limit is 30.
    default NEURON_RT_EXEC_TIMEOUT 5400
    # The CPU may run an operator that the device lacks, but must not hide one whose compilation failed.
    default TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS 1
fi

# ---- How many processes, and where --------------------------------------------------------------
output_dir=outputs device=auto check_only=0 previous=""
for a in "$@"; do # only what the launch itself must know
    case $previous in --output[_-]dir) output_dir=$a ;; --device) device=$a ;; esac
    case $a in
        --output[_-]dir=*) output_dir=${a#*=} ;;
        --device=*) device=${a#*=} ;;
        --check) check_only=1 ;;
        -h | --help | --dry[_-]run | --dry[_-]run=*) exec "$python" "$trainer" "$@" ;;
    esac
    previous=$a
done

problems=()
number() { # NAME LOWEST HIGHEST
    if ! [[ ${!1} =~ ^(0|[1-9][0-9]{0,5})$ ]] || ((${!1} < $2 || ${!1} > $3)); then
        problems+=("$1=${!1} must be a whole number from $2 to $3")
        return 1
    fi
}

devices=0
if [ "$device" = cpu ]; then
    :
elif [ "$trainium" = 1 ]; then
    number NEURON_LOGICAL_NC_CONFIG 1 2 || die "${problems[@]}"
    chips=("$neuron"[0-9]*)
    devices=$((${#chips[@]} * 8 / NEURON_LOGICAL_NC_CONFIG)) # a Trainium2 chip has 8 physical cores
elif [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    devices=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true)
elif have nvidia-smi; then
    devices=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
fi

if [ -n "${SLURM_JOB_ID-}" ]; then
    if ((${SLURM_STEP_NUM_TASKS:-1} > ${SLURM_STEP_NUM_NODES:-1})); then
        die "srun starts several tasks on a node, but one starts a process for each device: srun --ntasks-per-node=1"
    fi
    NNODES=${NNODES:-${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-1}}}
    if [ "$NNODES" != 1 ]; then
        NODE_RANK=${NODE_RANK:-${SLURM_NODEID-}}
        MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # jobs may share a node
        list=${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST-}} # the first of trn[07-09,12],cpu3 is trn07
        MASTER_ADDR=${MASTER_ADDR:-$(sed -E 's/^([^][,]*)(\[([^],-]*)[^]]*\])?.*/\1\3/' <<<"$list")}
    fi
fi
NGPU=${NGPU:-$((devices > 0 ? devices : 1))} NNODES=${NNODES:-1}
LOG_RANK=${LOG_RANK:-0} MAX_RESTARTS=${MAX_RESTARTS:-0}
number NGPU 1 $((devices > 0 ? devices : 4096)) || true # at most a process per device
number MAX_RESTARTS 0 1000 || true
[ -z "${MASTER_PORT-}" ] || number MASTER_PORT 1 65535 || true
[[ $LOG_RANK =~ ^[0-9]{1,4}(,[0-9]{1,4})*$ ]] || problems+=("LOG_RANK=$LOG_RANK must be local ranks, such as 0 or 0,3")
if number NNODES 1 100000 && [ "$NNODES" != 1 ]; then
    NODE_RANK=${NODE_RANK-unset}
    number NODE_RANK 0 $((NNODES - 1)) || true
    [ -n "${MASTER_ADDR-}" ] || problems+=("NNODES=$NNODES needs MASTER_ADDR, the name or address of node 0, on every node")
fi
[ ${#problems[@]} = 0 ] || die "${problems[@]}"
for a in ${LOG_RANK//,/ }; do
    ((10#$a < NGPU)) || die "LOG_RANK=$LOG_RANK: a node has local ranks 0 to $((NGPU - 1))"
done
world_size=$((NNODES * NGPU))

if [ "$NNODES" = 1 ]; then
    address=localhost port=${MASTER_PORT:-0} host=1 # port 0: a free one, so that runs never meet
else
    address=$MASTER_ADDR port=${MASTER_PORT:-29500} host=$((NODE_RANK == 0))
    if [ "$trainium" = 1 ]; then            # the network between the nodes is EFA
        default FI_PROVIDER efa             # no silent fall-back to TCP
        default FI_EFA_USE_DEVICE_RDMA 1    # from device memory to device memory
        default FI_EFA_FORK_SAFE 1          # Python forks
    fi
fi
if [ "$host" = 1 ] && [ "$port" != 0 ]; then
    "$python" -c "import socket; socket.create_server(('', $port))" 2>/dev/null ||
        die "MASTER_PORT=$port is in use on this machine"
fi
# One process: torch's own choice. More: they share the cores.
[ "$world_size" = 1 ] || default OMP_NUM_THREADS $((cores > NGPU ? cores / NGPU : 1))
unset RANK LOCAL_RANK WORLD_SIZE # another launcher's values would mislead the trainer
[ "$check_only" = 0 ] || WORLD_SIZE=$world_size exec "$python" "$trainer" "$@"

# ---- Run ----------------------------------------------------------------------------------------
tmp=$(mktemp -d)
trap 'trap "" INT TERM HUP; rm -rf "$tmp"' EXIT
export EXIT_CODE_FILE=$tmp/exit_code # the trainer writes its code there, because torchrun's is always 1
export STOP_FILE=$tmp/stop           # exists once a signal came from outside, not from torchrun after a rank failed

child="" signal=0 signal_time=0 sent=0
# The first signal goes on, once: Slurm and `timeout` send several. A later one ends everything. Builtins only, since
# a terminal's signal would end any other program called here, too.
# shellcheck disable=SC2329 # called by the traps below
forward() {
    if [ "$signal" = 0 ]; then
        signal=$1 signal_time=$SECONDS
        : >"$STOP_FILE"
        if [ -n "$child" ]; then sent=1 && kill "-$1" "$child" 2>/dev/null || true; fi
    elif ((SECONDS > signal_time + 1)) && [ -n "$child" ]; then
        say "second signal: stopping at once"
        pkill -KILL -P "$child" 2>/dev/null || true # torchrun gives each rank a session of its own
        kill -KILL -- "-$child" 2>/dev/null || true
    fi
    interrupted=1
}
trap 'forward 1' HUP
trap 'forward 2' INT
trap 'forward 15' TERM

# Runs the arguments in their own process group, where a terminal's Ctrl-C arrives only through forward. Sets $code.
supervise() {
    set -m
    "$@" </dev/null &
    child=$!
    set +m
    if ((signal != 0 && sent == 0)); then kill "-$signal" "$child" || true; fi # came just before
    interrupted=1
    while [ "$interrupted" = 1 ]; do # a signal ends `wait` before the child's end
        interrupted=0 code=0
        wait "$child" 2>/dev/null || code=$?
    done
    if [ "$code" = 0 ]; then return; fi
    if [ -s "$EXIT_CODE_FILE" ]; then
        read -r code <"$EXIT_CODE_FILE" || true # no line end
    elif [ "$signal" != 0 ]; then
        code=$((128 + signal))
    fi
}

logs=$output_dir/logs
if [ "$world_size" = 1 ] && [ "$MAX_RESTARTS" = 0 ]; then
    # No launcher needed, and the trainer itself checks its flags first: 6 seconds less.
    log=$logs/$(date +%Y%m%d-%H%M%S)-$$.log
    mkdir -p "$logs" || die "--output_dir $output_dir: cannot make $logs"
    exec 3> >(trap '' INT TERM HUP && exec tee -a "$log")
    out=$!
    exec 4> >(trap '' INT TERM HUP && exec tee -a "$log" >&2)
    err=$!
    supervise "$python" "$trainer" "$@" >&3 2>&4
    exec 3>&- 4>&-
    wait "$out" "$err" 2>/dev/null || true # the last lines
else
    # All mistakes in one message before any process group exists, and the data is tokenised once.
    WORLD_SIZE=$world_size supervise "$python" "$trainer" --check "$@"
    [ "$code" = 0 ] || exit "$code"
    [ "$signal" = 0 ] || exit $((128 + signal)) # it came too late for the check to notice
    [ "$NNODES" = 1 ] || say "node $NODE_RANK of $NNODES; it waits for the others, run.sh on each, at $address:$port"
    default TORCH_DISABLE_SHARE_RDZV_TCP_STORE 1 # else a restarted rank finds addresses of the attempt before
    default TORCH_ELASTIC_SHUTDOWN_TIMEOUT 600 # seconds for a last checkpoint after a signal, instead of 30
    arguments=(
        --nnodes "$NNODES" --nproc-per-node "$NGPU" --max-restarts "$MAX_RESTARTS" --role rank
        --rdzv-backend c10d --rdzv-endpoint "$address:$port" --rdzv-conf "is_host=$host"
        --rdzv-id "${SLURM_JOB_ID:-qwen3-trn}"
        --log-dir "$logs" --tee 3 --local-ranks-filter "$LOG_RANK"
    )
    if [ "$NNODES" = 1 ]; then arguments+=(--local-addr 127.0.0.1); fi # a laptop's own name may not resolve
    supervise "$python" -m torch.distributed.run "${arguments[@]}" "$trainer" "$@"
fi
exit "$code"
