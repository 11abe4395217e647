"""Sweeps: one job for each point, failures apart, finished points skipped; and Hydra's own applications."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcflow.slurm import sweep
from tests.slurm.cluster import Cluster, hpcflow
from tests.worlds import ROOT

TINY = ["experiment=tiny", "cluster=cpu_nodes", "models.reward.function=tests.training.judges:lower_half"]


def rows(said: str) -> dict[str, list[str]]:
    """The table's cells by point."""
    lines = [re.split(r"  +", line) for line in said.splitlines() if "=" in line.split("  ")[0]]
    return {cells[0]: cells[1:] for cells in lines if len(cells) > 2}


def test_points_in_hydras_order() -> None:
    assert sweep.points(["a=1", "placement=split,colocate", "seed=range(2)"]) == [
        ["a=1", "placement=split", "seed=0"],
        ["a=1", "placement=split", "seed=1"],
        ["a=1", "placement=colocate", "seed=0"],
        ["a=1", "placement=colocate", "seed=1"],
    ]


def test_a_sweep_over_placements(cluster: Cluster, fork_server: str, tmp_path: Path) -> None:
    words = [*TINY, "placement=colocate,split,standalone", "iterations=1", f"run.dir={tmp_path}"]
    done = hpcflow("train", "-m", "--at-once", "2", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    table = rows(done.stdout)
    assert {name: cells[:2] for name, cells in table.items()} == {
        f"placement={name}": ["finished", "1/1"] for name in ("colocate", "split", "standalone")
    }
    assert table["placement=colocate"][2] == table["placement=split"][2]  # the same training
    again = hpcflow("train", "-m", *words)
    assert again.stdout.count("finished before, skipped") == 3 and ": job" not in again.stdout
    assert rows(again.stdout) == table


def test_the_failure_of_a_point_concerns_that_point(
    cluster: Cluster, fork_server: str, tmp_path: Path
) -> None:
    words = [*TINY, "models.critic.worker=critic,tests.slurm.programs:BadCritic", "iterations=3"]
    words += ["cluster.env={MISBEHAVE: raise}", "cluster.slurm.relaunches=0", f"run.dir={tmp_path}"]
    done = hpcflow("train", "-m", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    states = [cells[:2] for cells in rows(done.stdout).values()]
    assert states == [["finished", "3/3"], ["failed", "2/3"]]


def test_a_hydra_application(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point on the ranks of one heterogeneous job; the second one fails, the others do not."""
    (tmp_path / "app.py").write_text(
        "import os, hydra\n"
        "@hydra.main(version_base='1.3', config_path=None)\n"
        "def main(cfg):\n"
        "    assert cfg.lr != 2\n"
        "    open(f\"rank_{os.environ['SLURM_PROCID']}_of_{os.environ['SLURM_NTASKS']}\", 'w')\n"
        "main()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["-m", "hydra/launcher=hpcflow", "+lr=1,2,3", "hydra.sweep.dir=out", "hydra.job.chdir=true"]
    done = subprocess.run(
        [sys.executable, "app.py", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "(+lr=2) failed" in done.stdout, done.stdout + done.stderr
    for point, ranks in ((0, 4), (1, 0), (2, 4)):
        assert len(list((tmp_path / "out" / str(point)).glob("rank_*_of_4"))) == ranks
