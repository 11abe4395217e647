#!/usr/bin/env bash
# PPO on a Llama 2 70B with a 70B reward model on 128 GPUs: 64 for the actor (FSDP2 over all, vLLM in groups
# of 8) and its reference, 32 for the critic, 32 for the reward.
#
#   sbatch sbatch/ppo_70b.sh [overrides]    a cluster, after 'bash tools/setup.sh' there
#   bash sbatch/ppo_70b.sh [overrides]      this machine, without Slurm
#
# The text of: hpcflow submit --dry-run experiment=ppo_70b
#
#SBATCH --job-name=ppo_70b
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
#SBATCH --job-name=ppo_70b
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR2@300
#SBATCH --nodes=16
#SBATCH --ntasks=128
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
exec "$root/.venv/bin/python" -m hpcflow train experiment=ppo_70b "$@"
