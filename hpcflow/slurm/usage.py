"""What a run's jobs asked for against what they used: GPU-hours by pool and stage, waiting, restarts, lost
work.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from hpcflow.slurm import client
from hpcflow.slurm.job import ATTEMPTS
from hpcflow.store import Run

Facts = dict[str, Any]


def lines(run: Run, history: list[Facts]) -> Iterable[str]:
    """Lines of a report; none for a run outside Slurm."""
    path = run.path / ATTEMPTS
    if not path.exists():
        return
    attempts = [json.loads(line) for line in path.read_text().splitlines()]
    jobs = list(dict.fromkeys(attempt["job"] for attempt in attempts))
    waited = {(a["job"], a["restart"]): a["queued_s"] for a in attempts if a.get("queued_s") is not None}
    restarts = sum(max(a["restart"] for a in attempts if a["job"] == job) for job in jobs)
    relaunches = len(attempts) - len(jobs) - restarts
    yield (
        f"job        {', '.join(jobs)}: {_seconds(sum(waited.values()))} in the queue, "
        f"{restarts} times queued again, {max(0, relaunches)} times launched again"
    )
    yield from _pools(run, history, attempts)
    yield f"lost       {_seconds(lost(attempts, history))} of work after the last commit before an end"
    yield from _accounted(jobs)


def requested(attempts: list[Facts]) -> dict[str, float]:
    """Rank-seconds that the allocations held, by component."""
    held: Counter[str] = Counter()
    for attempt in attempts:
        for component in attempt["components"]:
            held[component["name"]] += component["ranks"] * (attempt["time"] - attempt["start"])
    return dict(held)


def lost(attempts: list[Facts], history: list[Facts]) -> float:
    """Seconds between the last commit in an attempt that did not end well and its end."""
    total = 0.0
    for attempt in attempts:
        if attempt["code"]:
            commits = [f["time"] for f in history if attempt["start"] <= f["time"] <= attempt["time"]]
            total += attempt["time"] - max(commits, default=attempt["start"])
    return total


def _pools(run: Run, history: list[Facts], attempts: list[Facts]) -> Iterable[str]:
    """By pool, used against requested; what was used, by stage."""
    hours = sum(attempt["time"] - attempt["start"] for attempt in attempts) / 3600
    unit = "GPU" if any(c["gpus"] for a in attempts for c in a["components"]) else "rank"
    pools = run.config.get("placement", {}).get("pools", {})
    for name, pool in pools.items():
        stages: Counter[str] = Counter()
        for node in (node for facts in history for node in facts.get("nodes", ())):
            if node["model"] in pool["models"]:
                busy = node.get("busy") or {}
                stages[f"{node['model']}.{node['method']}"] += sum(busy.values()) / 3600
        asked = pool["ranks"] * hours
        share = f" ({100 * sum(stages.values()) / asked:.0f} %)" if asked else ""
        parts = ", ".join(f"{stage} {hours_of:.3g}" for stage, hours_of in stages.most_common(4))
        used = sum(stages.values())
        yield f"pool       {name}: {used:.3g} of {asked:.3g} {unit}-hours used{share}: {parts}"


def _accounted(jobs: list[str]) -> Iterable[str]:
    """What Slurm's own accounting says, where there is any."""
    try:
        said = client.run(
            "sacct", "-n", "-P", "-X", "-o", "JobID,State,Elapsed,AllocTRES", "-j", ",".join(jobs)
        )
    except client.SlurmError:
        return
    for line in said.splitlines():
        yield "sacct      " + "  ".join(line.split("|"))


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 3600:.1f} h"
