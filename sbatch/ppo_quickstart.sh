#!/usr/bin/env bash
# PPO on SmolLM2-135M-Instruct: the model learns to write cheerful sentences. Real MPI ranks, vLLM and FSDP2 on CPU cores.
#
#   bash sbatch/ppo_quickstart.sh [overrides]        any Linux machine: no Slurm, MPI or GPU needed
#   sbatch sbatch/ppo_quickstart.sh [overrides]      a cluster, after 'bash tools/setup.sh' on its login node
#   e.g.  bash sbatch/ppo_quickstart.sh iterations=2 placement=split
#
#SBATCH --job-name=ppo_quickstart
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.log
set -euo pipefail

script=${BASH_SOURCE[0]}
if [[ -n ${SLURM_JOB_ID:-} && ! -f $(dirname -- "$script")/../tools/setup.sh ]]; then    # sbatch runs a copy of the script
    script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
fi
root=$(cd -- "$(dirname -- "$script")/.." && pwd)

bash "$root/tools/setup.sh"
exec "$root/.venv/bin/hpcflow" train experiment=ppo_quickstart "$@"
