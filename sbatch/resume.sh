#!/usr/bin/env bash
# Continue a run from its last committed iteration, with RUN@N as it was after iteration N, on nodes for
# quickstart. Any other run, on its own nodes: hpcflow submit --resume RUN[@N]
#
#   sbatch sbatch/resume.sh RUN[@N] [overrides]    a cluster, after 'bash tools/setup.sh' there
#   bash sbatch/resume.sh RUN[@N] [overrides]      this machine, without Slurm
#
# The text of: hpcflow submit --dry-run --resume RUN
#
#SBATCH --job-name=quickstart
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR2@120
#SBATCH --nodes=1
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=1
#SBATCH --mem=4G
#SBATCH hetjob
#SBATCH --job-name=quickstart
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR2@120
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2
#SBATCH --mem=8G
#SBATCH hetjob
#SBATCH --job-name=quickstart
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR2@120
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2
#SBATCH --mem=8G
set -euo pipefail

script=${BASH_SOURCE[0]}
if [[ -n ${SLURM_JOB_ID:-} && ! -d $(dirname -- "$script")/../hpcflow ]]; then  # sbatch runs a copy of it
    script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\(.*\.sh\).*/\1/p' | head -n 1)
fi
root=$(cd -- "$(dirname -- "$script")/.." && pwd)

[[ ! -f $root/tools/setup.sh ]] || bash "$root/tools/setup.sh"
export PYTHONSAFEPATH=1 PYTHONPATH=$root:$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$root/.venv/bin/python" -m hpcflow train --resume "$@"
