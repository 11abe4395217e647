"""The scripts in sbatch/ are what the command writes, and Slurm takes them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcflow import check_machine
from hpcflow.check import check
from hpcflow.config import Component, compose
from hpcflow.schema import ConfigError
from hpcflow.slurm import client, script, site, submission
from hpcflow.slurm.components import blocks
from tests.slurm.cluster import Cluster, hpcflow
from tests.worlds import ROOT

EXPERIMENTS = ["ppo_quickstart", "ppo_7b", "ppo_70b", "remax_13b", "safe_rlhf_7b"]
SWEEP = ["experiment=ppo_quickstart", "placement=colocate,split,standalone"]


def dry_run(*words: str, folder: Path) -> str:
    done = hpcflow("submit", "--dry-run", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_script_is_the_text_of_the_command(name: str, tmp_path: Path, at_root: None) -> None:
    assert (ROOT / "sbatch" / f"{name}.sh").read_text() == dry_run(f"experiment={name}", folder=tmp_path)
    written = tmp_path / "runs" / "dry-run" / compose([f"experiment={name}"]).name
    assert sorted(path.name for path in written.iterdir()) == ["config.yaml", "job.sh"]


def test_the_scripts_that_are_no_experiments(tmp_path: Path, at_root: None) -> None:
    assert (ROOT / "sbatch" / "sweep_placements.sh").read_text() == dry_run("-m", *SWEEP, folder=tmp_path)
    quickstart = compose(["experiment=ppo_quickstart"])
    assert (ROOT / "sbatch" / "resume.sh").read_text() == script.resume_text(quickstart)
    assert sorted(p.stem for p in (ROOT / "sbatch").glob("*.sh")) == sorted(
        [*EXPERIMENTS, "resume", "sweep_placements"]
    )


@pytest.mark.parametrize("name", [*EXPERIMENTS, "resume", "sweep_placements"])
def test_slurm_would_start_it(cluster: Cluster, name: str) -> None:
    """On 17 nodes with 8 GPUs each."""
    assert "to start at" in client.run("sbatch", "--test-only", str(ROOT / "sbatch" / f"{name}.sh"))


def test_components_in_rank_order() -> None:
    seventy = blocks(compose(["experiment=ppo_70b"]))
    assert [(b.name, b.ranks, b.nodes, b.gpus_per_node) for b in seventy] == [
        ("head", range(2), 1, 0),
        ("gpu", range(2, 130), 16, 8),
    ]
    words = ["experiment=tiny", "placement=split", "placement.pools.policy.ranks=5", "cluster=cpu_nodes"]
    uneven = blocks(compose([*words, "cluster.components.workers.ranks_per_node=4"]))
    assert [(b.ranks, b.nodes, b.tasks_per_node) for b in uneven] == [
        (range(2), 1, 2),
        (range(2, 3), 1, 1),
        (range(3, 8), 2, 4),
    ]
    one = blocks(compose(["experiment=ppo_7b", "cluster.slurm.heterogeneous=false"]))
    assert [(b.ranks, b.nodes, b.gpus_per_node) for b in one] == [(range(10), 2, 8)]


def test_site_settings_reach_every_component() -> None:
    words = [
        "experiment=ppo_70b",
        "cluster.slurm.account=proj7",
        "cluster.slurm.partition=gpu",
        "cluster.slurm.qos=long",
    ]
    words += [
        "cluster.components.gpu.constraint=a100",
        "cluster.slurm.head.partition=cpu",
        "cluster.slurm.flags={exclusive: true}",
    ]
    words += ["cluster.slurm.setup=[module load cuda]", "cluster.components.gpu.flags={gpu-bind: none}"]
    text = script.text(compose(words), words)
    head, gpu = text.split("#SBATCH hetjob\n")
    for flag in ("--account=proj7", "--qos=long", "--exclusive", "--time=24:00:00", "--signal=B:USR2@300"):
        assert f"#SBATCH {flag}\n" in head and f"#SBATCH {flag}\n" in gpu
    assert "--partition=cpu" in head and "--partition=gpu" in gpu
    assert "--constraint=a100" in gpu and "--constraint" not in head and "--gpu-bind=none" in gpu
    assert "\nmodule load cuda\n" in gpu
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


TINY = ["experiment=tiny", "placement=split", "cluster=cpu_nodes"]


@pytest.mark.parametrize("words, says", [
    (["cluster.slurm.partition=man"],
     "cluster.slurm.partition=man: the cluster has no such partition; works: "
     "cluster.slurm.partition=main"),
    (["cluster.components.workers.partition=gpu"], "cluster.components.workers.partition=gpu: "
     "the cluster has no"),
    (["cluster.components.workers.gpus=9"], "a node of main has 8"),
    (["cluster.components.workers.gpus=1", "placement.pools.value.ranks=200"],
     "200 ranks at 1 a node are 200 nodes; main has 17, 136 GPUs in all"),
    (["cluster.components.workers.gpus=1", "placement.pools.value.ranks=16"],
     "its components share no node and take 1 + 1 + 16 = 18 nodes; main has 17"),
    (["cluster.components.workers.cpus=129"], "129 on a node; main has 128; works: "
     "cluster.components.workers.cpus=128"),
    (["cluster.components.workers.memory_gib=4000"], "works: cluster.components.workers.memory_gib=1953"),
    (["placement=one", "placement.pools={all: {ranks: 1, models: [actor, critic, reference, reward]}}"],
     "would be a component without tasks"),
    (["cluster.components.workers.ranks=0"], "cluster.components.workers.ranks=0: must be at least 1"),
    (["cluster.components.workers.ranks=7"], "the components hold 8 ranks, placement split has 2: "
     "it was made for another cluster"),
    (["models.actor.path=/nowhere/model"], "models.actor.path=/nowhere/model: "
     "model path '/nowhere/model' is not a folder"),
    (["models.actor.path=shape:llama_8b"], "works: shape:llama_7b"),
    (["cluster.slurm.heterogeneous=false"], "slurm.heterogeneous=false makes one component"),
    (["cluster.slurm.time=soon"], "works: cluster.slurm.time=01:00:00"),
    (["cluster.slurm.flags={nodelist: nowhere}"], "sbatch refused"),
])  # fmt: skip
def test_a_mistake_is_named_before_submission(
    cluster: Cluster, tmp_path: Path, words: list[str], says: str
) -> None:
    words = [word for word in words if word != "placement=one"]
    done = hpcflow("submit", *TINY, *words, f"run.dir={tmp_path}/runs")
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_is_a_shape_must_be_there_to_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hpcflow.data.models import resolve_model

    monkeypatch.delenv("HPCFLOW_MODELS", raising=False)
    with pytest.raises(ValueError, match="HPCFLOW_MODELS, which is not set"):
        resolve_model("shape:llama_7b")
    monkeypatch.setenv("HPCFLOW_MODELS", str(tmp_path))
    with pytest.raises(ValueError, match="is not a folder"):
        resolve_model("shape:llama_7b")
    (tmp_path / "llama_7b").mkdir()
    (tmp_path / "llama_7b" / "config.json").write_text('{"hidden_size": 8192, "num_hidden_layers": 32}')
    with pytest.raises(ValueError, match="hidden_size=8192, shape:llama_7b has 4096"):
        resolve_model("shape:llama_7b")


@pytest.mark.parametrize(
    "models, says", [(None, "HPCFLOW_MODELS, which is not set"), ("", "is not a folder")]
)
def test_a_shape_without_weights_is_not_submitted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, models: str | None, says: str
) -> None:
    """Checked it can be, unless HPCFLOW_MODELS says where the weights are to be."""
    room = type("Usage", (), {"free": 2**50})
    monkeypatch.setattr(check_machine.shutil, "disk_usage", lambda path: room)
    monkeypatch.setattr(site, "problems", lambda config: [])
    monkeypatch.delenv("HPCFLOW_MODELS", raising=False)
    if models is not None:
        monkeypatch.setenv("HPCFLOW_MODELS", str(tmp_path))
    words = ["models.actor.path=shape:llama_7b", "models.reference.path=shape:llama_7b"]
    words += ["models.critic.path=shape:llama_7b", f"run.dir={tmp_path}/runs", "cluster.memory_gib=2000"]
    config = compose([*TINY, *words])
    checked = [str(problem) for problem in check(config) if "shape:" in str(problem)]
    assert len(checked) == (0 if models is None else 3) and all(says in line for line in checked)
    for refused in (
        lambda: submission.submit(config, [*TINY, *words]),
        lambda: submission.try_out(config, [*TINY, *words]),
    ):
        with pytest.raises(ConfigError, match=says):
            refused()
    assert not list(tmp_path.glob("runs/*"))


def test_gpus_of_sinfo() -> None:
    assert site.gpus_in("gpu:a100:4(S:0-1),gpu:2") == 6
    assert site.gpus_in("gpu:8") == 8
    assert site.gpus_in("(null)") == site.gpus_in("craynetwork:4") == 0


def test_without_slurm_the_command_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(client.SlurmError, match="there is no sinfo on PATH"):
        submission.refuse_problems(compose([*TINY, f"run.dir={tmp_path}"]))


def test_component_defaults_to_all_workers() -> None:
    assert [b.component for b in blocks(compose(["experiment=tiny"]))][1] == Component()


def test_a_run_directory_in_use_by_a_job_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """Also by one that only waits; the run can be continued when the job is gone."""
    held = cluster.submit(*TINY, "cluster.slurm.flags={hold: true}", f"run.dir={tmp_path}")
    again = hpcflow("submit", "--resume", str(held.run))
    assert again.returncode == 2 and f"is in use by job {held.id} (PENDING)" in again.stderr, again.stderr
    cluster.cancel_all()
    assert cluster.submit("--resume", str(held.run)).run == held.run
