"""The text of a job's sbatch script: literal, readable, the same as in ``sbatch/``.

A script starts ``hpcflow train`` on the first node of the head; that one starts all ranks by a single srun over
all components (`hpcflow.mpi.launch`) and keeps the run alive (`hpcflow.slurm.job`). It also runs without Slurm.
"""

from __future__ import annotations

import shlex
import textwrap
from typing import Any

from hpcflow.config import Config, share
from hpcflow.slurm.components import Block, blocks

BODY = """\
set -euo pipefail
{setup}
script=${{BASH_SOURCE[0]}}
if [[ -n ${{SLURM_JOB_ID:-}} && ! -d $(dirname -- "$script")/../hpcflow ]]; then    # sbatch runs a copy of the script
    script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\\([^ ]*\\).*/\\1/p' | head -n 1)
fi
root=$(cd -- "$(dirname -- "$script")/.." && pwd)

[[ ! -f $root/tools/setup.sh ]] || bash "$root/tools/setup.sh"
export PYTHONSAFEPATH=1 PYTHONPATH=$root:$PWD${{PYTHONPATH:+:$PYTHONPATH}}
exec "$root/.venv/bin/python" -m hpcflow {command}
"""


def text(config: Config, words: list[str], resume: bool = False) -> str:
    """The script that trains ``words``, the overrides of which ``config`` was composed.

    ``resume``: the run directory comes as the script's first argument.
    """
    name = config.experiment or config.name
    train = "train --resume " if resume else f"train {shlex.join(words)} "
    setup = "".join(line + "\n" for line in config.cluster.slurm.setup)
    body = BODY.format(setup=setup, command=train + '"$@"')
    return "#!/usr/bin/env bash\n" + _head(name, words, resume) + directives(config) + body


def directives(config: Config, signal: str = "B:USR2") -> str:
    """The #SBATCH lines. ``signal`` goes to the batch script alone (B:), or else to all ranks."""
    slurm = config.cluster.slurm
    parts = []
    for index, block in enumerate(blocks(config)):
        options: dict[str, Any] = {"job-name": config.name} | (_job_options(config) if index == 0 else {})
        options |= {"time": slurm.time, "signal": f"{signal}@{slurm.signal_s}"}
        parts.append("".join(f"#SBATCH {_flag(k, v)}\n" for k, v in (options | _block_options(config, block)).items()))
    return "#SBATCH hetjob\n".join(parts)


def _job_options(config: Config) -> dict[str, Any]:
    """Those that belong to the whole job: Slurm takes them from the first component."""
    requeue = "requeue" if config.cluster.slurm.requeue else "no-requeue"
    return {"output": "%x-%j.log", "open-mode": "append", requeue: True}


def _block_options(config: Config, block: Block) -> dict[str, Any]:
    slurm, component = config.cluster.slurm, block.component
    options = {
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "partition": component.partition or slurm.partition,
        "constraint": component.constraint,
        "nodes": block.nodes,
        "ntasks": len(block.ranks),
        "ntasks-per-node": block.tasks_per_node if block.nodes > 1 else None,
        "cpus-per-task": component.cpus,
        "gpus-per-node": block.gpus_per_node or None,
        "mem": f"{block.memory_gib}G" if block.memory_gib else 0,
    }
    extra = {**slurm.flags, **component.flags}
    return {k: v for k, v in (options | extra).items() if v is not None and v is not False}


def _flag(name: str, value: Any) -> str:
    flag = "--" + name.replace("_", "-")
    return flag if value is True else f"{flag}={shlex.quote(str(value))}"


def _head(name: str, words: list[str], resume: bool) -> str:
    """What the job is for, in the words of the experiment's own config, and how to use the script."""
    said = "Continue a run from its last committed iteration." if resume else experiment_says(name)
    argument = "RUN " if resume else ""
    lines = textwrap.wrap(said, 110) if said else []
    lines += [
        "",
        f"  sbatch sbatch/{name}.sh {argument}[overrides]      a cluster, after 'bash tools/setup.sh' on its login node",
        f"  bash sbatch/{name}.sh {argument}[overrides]        this machine, without Slurm",
        "",
        f"The text of: hpcflow submit --dry-run {'--resume RUN ' if resume else ''}{shlex.join(words)}".rstrip(),
        "",
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def experiment_says(name: str) -> str:
    """The comment at the top of an experiment's config, as one paragraph; "" where there is none."""
    path = share("configs") / "experiment" / f"{name}.yaml"
    if not path.is_file():
        return ""
    lines = path.read_text().splitlines()
    comment = [line.lstrip("# ") for line in lines if line.startswith("#") and not line.startswith("# @")]
    return " ".join(comment)
