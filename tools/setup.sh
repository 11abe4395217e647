#!/usr/bin/env bash
# Make .venv in this checkout ready: Python 3.11+, pinned packages, hpcflow itself. No compiler, MPI, Slurm or GPU needed.
#
#   bash tools/setup.sh        about 3 minutes and 4 GiB the first time, then well under a second
#
# Run it again after an interruption: what is complete stays. Only one runs at a time; a second one waits. Inside a Slurm job it
# installs nothing (compute nodes have no network): run it once on the login node.
#   HPCFLOW_PYTHON=/path/python3   the interpreter to build .venv with
#   HPCFLOW_EXTRA=cpu|gpu          instead of looking for a GPU with nvidia-smi
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=$root/.venv
python=$venv/bin/python
log=$root/.venv-setup.log
need_gib=6

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

find_python() {
    local name found=""
    for name in ${HPCFLOW_PYTHON:-python3.11 python3 python3.12 python3.13 python}; do
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        found=$name
        "$name" -c 'import ensurepip, venv' 2>/dev/null && { echo "$name"; return; }
    done
    [[ -z $found ]] || die "$(command -v "$found") has no venv module; on Debian and Ubuntu: apt install python3-venv"
    [[ -z ${HPCFLOW_PYTHON:-} ]] || die "HPCFLOW_PYTHON=$HPCFLOW_PYTHON is no Python 3.11 or newer"
    die "no Python 3.11 or newer on PATH (python3 is $(python3 -V 2>/dev/null || echo missing)); name one: HPCFLOW_PYTHON=/path/python3 bash tools/setup.sh"
}

choose_extra() {
    if [[ -n ${HPCFLOW_EXTRA:-} ]]; then echo "$HPCFLOW_EXTRA"
    elif nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then echo gpu
    else echo cpu; fi
}

# What the environment was made from. Its last line is written when all is done, so a stamp means a complete environment.
stamp() {
    sha256sum -- requirements/*.txt pyproject.toml
    grep '^version' "$venv/pyvenv.cfg"
    echo "$root $extra"
}
up_to_date() { [[ -f $venv/stamp && -x $python ]] && "$python" -c '' 2>/dev/null && [[ $(<"$venv/stamp") == "$(stamp)" ]]; }

# The last lines of a failed pip or uv, as one line that says what to do.
explain() {
    if grep -qE 'No space left' "$log"; then die "the disk is full; free space in $root and run again"
    elif grep -qiE 'name resolution|NewConnection|ConnectTimeout|unreachable|Max retries|ProxyError|connection (refused|broken)|failed to fetch|dns error|from versions: none' "$log"
    then die "no network: the package index could not be reached. Run again when it can; what is there is kept ($log)"
    else die "$1 failed: $(grep -iE '^ *(error|×|  ╰)|not find' "$log" | tail -1 | cut -c1-300 || true) ($log)"; fi
}

pip() { PIP_NO_INPUT=1 PIP_RETRIES=${PIP_RETRIES:-2} "$python" -m pip --disable-pip-version-check "$@" >>"$log" 2>&1; }

uv() {
    pip install --quiet uv==0.13.9 || explain "installing uv"
    "$venv/bin/uv" pip install --python "$python" "$@" >>"$log" 2>&1
}

check_space() {
    local free have
    free=$(df -Pk -- "$root" | awk 'NR == 2 {print $4}')
    have=$(du -sk -- "$venv" 2>/dev/null | cut -f1 || true)
    (( free + ${have:-0} >= need_gib << 20 )) ||
        die "$root has $((free >> 20)) GiB free and the environment needs $need_gib; free some or put the checkout on a larger disk"
}

make_venv() {
    local base
    if [[ -f $venv/pyvenv.cfg ]] && "$python" -m pip --version >/dev/null 2>&1 && grep -qF -- "$venv" "$venv/bin/activate"; then
        # An interrupted install: a package without its RECORD is incomplete, and pip must not take it for installed.
        "$python" - <<'PY'
import pathlib, shutil, sysconfig
packages = pathlib.Path(sysconfig.get_path("purelib"))
for info in [p for p in packages.glob("*.dist-info") if not (p / "RECORD").exists()] + list(packages.glob("~*")):
    shutil.rmtree(info)
PY
        return
    fi
    base=$(find_python)
    rm -rf -- "$venv"                       # none, half made, or made for another place
    say "creating .venv with $("$base" -V)"
    "$base" -m venv "$venv" >>"$log" 2>&1 || explain "creating .venv"
}

install_packages() {
    local tag lock torch
    tag=$("$python" -c 'import platform, sys; print(sys.platform, platform.machine(), "py%d%d" % sys.version_info[:2], sep="-")')
    lock=requirements/$extra-$tag.txt
    if [[ ! -f $lock ]]; then
        say "no lock for $extra-$tag: resolving hpcflow[$extra,quickstart,tests] (log: $log)"
        uv --torch-backend=auto --overrides requirements/overrides.txt ".[$extra,quickstart,tests]" "setuptools>=70.1" ||
            explain "resolving hpcflow's requirements"
        return
    fi
    say "installing $(grep -c == "$lock") packages of $lock (about 3 minutes; log: $log)"
    torch=$(grep '^torch==' "$lock")
    if pip install --dry-run --no-deps "$torch"; then   # the index that pip uses has this build
        pip install --no-deps -r "$lock" || explain "installing $lock"
    elif grep -qiE 'connection|name resolution|unreachable|from versions: none' "$log"; then
        explain "looking for $torch"
    else                                    # uv knows where PyTorch's CPU builds are
        uv --torch-backend=cpu --no-deps -r "$lock" || explain "installing $lock"
    fi
}

extra=$(choose_extra)
up_to_date && exit 0
[[ -z ${SLURM_JOB_ID:-} ]] || die "the environment is not ready; run 'bash tools/setup.sh' on the login node first"
exec 9>"$root/.venv-setup.lock"
flock -n 9 || { say "another set-up of this checkout is running; waiting for it"; flock 9; }
up_to_date && exit 0
: >"$log"
check_space
trap 'say "interrupted; run it again to go on"; exit 130' INT TERM
rm -f -- "$venv/stamp"
make_venv
install_packages
pip install --no-deps --no-build-isolation --editable . || explain "installing hpcflow"
stamp >"$venv/stamp.part"
mv -- "$venv/stamp.part" "$venv/stamp"
say "ready: $venv"
