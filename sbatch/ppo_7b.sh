#!/usr/bin/env bash
# PPO on a Llama 2 7B with a reward model, all four models sharing one node of eight 80 GiB GPUs.
#
#   sbatch sbatch/ppo_7b.sh [overrides]    a cluster, after 'bash tools/setup.sh' there
#   bash sbatch/ppo_7b.sh [overrides]      this machine, without Slurm
#
# The text of: hpcflow submit --dry-run experiment=ppo_7b
#
#SBATCH --job-name=ppo_7b
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
#SBATCH --job-name=ppo_7b
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR2@300
#SBATCH --nodes=1
#SBATCH --ntasks=8
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
exec "$root/.venv/bin/python" -m hpcflow train experiment=ppo_7b "$@"
