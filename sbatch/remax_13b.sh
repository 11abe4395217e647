#!/usr/bin/env bash
# ReMax on a Llama 2 13B: no critic, so two nodes of eight 80 GiB GPUs hold actor, reference and reward model
# together.
#
#   sbatch sbatch/remax_13b.sh [overrides]    a cluster, after 'bash tools/setup.sh' there
#   bash sbatch/remax_13b.sh [overrides]      this machine, without Slurm
#
# The text of: hpcflow submit --dry-run experiment=remax_13b
#
#SBATCH --job-name=remax_13b
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR2@300
#SBATCH --nodes=1
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=2
#SBATCH --mem=16G
#SBATCH hetjob
#SBATCH --job-name=remax_13b
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR2@300
#SBATCH --nodes=2
#SBATCH --ntasks=16
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=8
#SBATCH --mem=880G
set -euo pipefail

script=${BASH_SOURCE[0]}
if [[ -n ${SLURM_JOB_ID:-} && ! -d $(dirname -- "$script")/../hpcflow ]]; then  # sbatch runs a copy of it
    script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\(.*\.sh\).*/\1/p' | head -n 1)
fi
root=$(cd -- "$(dirname -- "$script")/.." && pwd)

[[ ! -f $root/tools/setup.sh ]] || bash "$root/tools/setup.sh"
export PYTHONSAFEPATH=1 PYTHONPATH=$root:$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$root/.venv/bin/python" -m hpcflow train experiment=remax_13b "$@"
