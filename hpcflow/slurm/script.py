"""The text of a job's sbatch script: literal, readable, the same as in ``sbatch/``.

A script starts ``hpcflow train`` on the first node of the head; that one starts all ranks by a single srun
over all components (`hpcflow.mpi.launch`) and keeps the run alive (`hpcflow.slurm.job`). It also runs
without Slurm.
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
if [[ -n ${{SLURM_JOB_ID:-}} && ! -d $(dirname -- "$script")/../hpcflow ]]; then  # sbatch runs a copy of it
    script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\\(.*\\.sh\\).*/\\1/p' | head -n 1)
fi
root=$(cd -- "$(dirname -- "$script")/.." && pwd)

[[ ! -f $root/tools/setup.sh ]] || bash "$root/tools/setup.sh"
export PYTHONSAFEPATH=1 PYTHONPATH=$root:$PWD${{PYTHONPATH:+:$PYTHONPATH}}
exec "$root/.venv/bin/python" -m hpcflow {command}
"""


def text(config: Config, words: list[str]) -> str:
    """The script that trains ``words``, the overrides of which ``config`` was composed."""
    name = config.experiment or config.name
    head = _head(_experiment_says(name), name, "", shlex.join(words))
    return head + directives(config) + _body(config, f"train {shlex.join(words)}")


def resume_text(config: Config) -> str:
    """The script that continues a run, whose directory is its first argument, on nodes as ``config`` needs
    them.
    """
    said = "Continue a run from its last committed iteration, with RUN@N as it was after iteration N, "
    said += f"on nodes for {config.name}. Any other run, on its own nodes: hpcflow submit --resume RUN[@N]"
    head = _head(said, "resume", "RUN[@N] ", "--resume RUN")
    return head + directives(config) + _body(config, "train --resume")


def sweep_text(config: Config, words: list[str]) -> str:
    """The script of a small job that submits one job for each point of ``words``, and compares them at the
    end.
    """
    said = f"One job for each point of a sweep over {config.name}, a few at a time, and a table of them."
    head = _head(said, "sweep_placements", "", "-m " + shlex.join(words))
    options = {"job-name": "sweep"} | _job_options(config) | {"time": "7-00:00:00", "ntasks": 1, "mem": "2G"}
    lines = "".join(f"#SBATCH {_flag(k, v)}\n" for k, v in options.items())
    return head + lines + _body(config, f"train -m {shlex.join(words)}")


def directives(config: Config, signal: str = "B:USR2") -> str:
    """The #SBATCH lines. ``signal`` goes to the batch script alone (B:), or else to all ranks."""
    slurm = config.cluster.slurm
    parts = []
    for index, block in enumerate(blocks(config)):
        options: dict[str, Any] = {"job-name": config.name} | (_job_options(config) if index == 0 else {})
        options |= {"time": slurm.time, "signal": f"{signal}@{slurm.signal_s}"}
        parts.append(
            "".join(f"#SBATCH {_flag(k, v)}\n" for k, v in (options | _block_options(config, block)).items())
        )
    return "#SBATCH hetjob\n".join(parts)


def _job_options(config: Config) -> dict[str, Any]:
    """Those that belong to the whole job: Slurm takes them from the first component."""
    requeue = "requeue" if config.cluster.slurm.requeue else "no-requeue"
    return {"output": "%x-%j.log", "open-mode": "append", requeue: True}


def _block_options(config: Config, block: Block) -> dict[str, Any]:
    slurm, component = config.cluster.slurm, block.component
    options: dict[str, Any] = {
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


def _body(config: Config, command: str) -> str:
    setup = "".join(line + "\n" for line in config.cluster.slurm.setup)
    return BODY.format(setup=setup, command=command + ' "$@"')


def _head(said: str, name: str, argument: str, words: str) -> str:
    """What the job is for, how to start it, and which command writes this text."""
    lines = [
        *textwrap.wrap(said, 108),
        "",
        f"  sbatch sbatch/{name}.sh {argument}[overrides]    a cluster, after 'bash tools/setup.sh' there",
        f"  bash sbatch/{name}.sh {argument}[overrides]      this machine, without Slurm",
        "",
        f"The text of: hpcflow submit --dry-run {words}",
        "",
    ]
    return "#!/usr/bin/env bash\n" + "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _experiment_says(name: str) -> str:
    """The comment at the top of an experiment's config, as one paragraph; "" where there is none."""
    path = share("configs") / "experiment" / f"{name}.yaml"
    if not path.is_file():
        return ""
    lines = path.read_text().splitlines()
    comment = [line.lstrip("# ") for line in lines if line.startswith("#") and not line.startswith("# @")]
    return " ".join(comment)
