#!/usr/bin/env bash
# One job for each point of a sweep over quickstart, a few at a time, and a table of them.
#
#   sbatch sbatch/sweep_placements.sh [overrides]    a cluster, after 'bash tools/setup.sh' there
#   bash sbatch/sweep_placements.sh [overrides]      this machine, without Slurm
#
# The text of: hpcflow submit --dry-run -m experiment=ppo_quickstart placement=colocate,split,standalone
#
#SBATCH --job-name=sweep
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --time=7-00:00:00
#SBATCH --ntasks=1
#SBATCH --mem=2G
set -euo pipefail

script=${BASH_SOURCE[0]}
if [[ -n ${SLURM_JOB_ID:-} && ! -d $(dirname -- "$script")/../hpcflow ]]; then  # sbatch runs a copy of it
    script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\(.*\.sh\).*/\1/p' | head -n 1)
fi
root=$(cd -- "$(dirname -- "$script")/.." && pwd)

[[ ! -f $root/tools/setup.sh ]] || bash "$root/tools/setup.sh"
export PYTHONSAFEPATH=1 PYTHONPATH=$root:$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$root/.venv/bin/python" -m hpcflow train -m experiment=ppo_quickstart placement=colocate,split,standalone "$@"
