"""The command line: what it prints, refuses and leaves behind. The launch is a stand-in: no ranks start."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
import yaml

from hpcflow import cli, config, report, run_folder
from hpcflow.mpi import launch

ROOT = Path(__file__).parents[1]
TINY = "experiment=tiny"


class Launches(list):
    code = 0

    def stand_in(self, run, world_size, **keywords):
        self.append((run, world_size, keywords))
        return self.code


@pytest.fixture
def launches(monkeypatch):
    """The launches that would have been, as (run, world size, keywords); their exit code can be set."""
    made = Launches()
    monkeypatch.setattr(launch, "launch", made.stand_in)
    monkeypatch.setattr(report, "report", lambda run: f"report of {run}\n")
    return made


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_train_makes_a_run_directory_and_launches_it(launches, runs, capsys):
    assert cli.main(["train", TINY, "iterations=2", "placement=split", "cluster.env={A: b}"]) == 0
    [(run, world, keywords)] = launches
    assert run.parent == runs and re.fullmatch(r"tiny-\d{8}-\d{6}", run.name)
    assert world == 4 and keywords == {
        "launcher": "auto",
        "slurm": config.Slurm(),
        "threads_per_rank": 1,
        "env": {"A": "b"},
    }
    written = config.load(run / "config.yaml")
    assert (written.iterations, written.placement.name, written.experiment) == (2, "split", "tiny")
    stored = json.loads((run / "objects.json").read_text())
    assert {name: entry["sha256"] for name, entry in stored.items()} == config.hashes(written)
    assert stored["algorithm"]["content"]["seed"] == 0
    [line] = map(json.loads, (run / "launches.jsonl").read_text().splitlines())
    assert line["world"] == 4 and not line["resumed"] and line["objects"] == config.hashes(written)
    assert {"torch", "transformers", "h5py"} <= line["packages"].keys() and line["argv"] == sys.argv
    out = capsys.readouterr().out
    assert f"run directory {run}" in out and out.endswith(f"report of {run}\n")


def test_a_failed_launch_leaves_its_exit_code_and_how_to_go_on(launches, runs, capsys):
    launches.code = 139
    assert cli.main(["train", TINY]) == 139
    run = launches[0][0]
    captured = capsys.readouterr()
    assert f"hpcflow train --resume {run}" in captured.err and "report of" not in captured.out


TRACEBACK = (
    'rank 2 failed in reward.compute_reward (call 25):\nTraceback (most recent call last):\n  File "a.py", '
    "line 1, in score\n    x()\n    ^^^\n{}: 8 of 8 rewards failed\nof all\n"
)


@pytest.mark.parametrize(
    "error, says",
    [
        ("no space left\nmore", "no space left"),
        (
            TRACEBACK.format("OSError"),
            "rank 2 failed in reward.compute_reward (call 25): OSError: 8 of 8 rewards failed",
        ),
        ('rank 3 hangs: build\n  File "a.py", line 1\n\nThe limit', "rank 3 hangs: build"),
        ("x" * 5000, "x" * (300 - len("hpcflow: cause: "))),
        ("", None),
        (None, None),
    ],
)
def test_the_cause_of_a_failed_launch_is_the_last_but_one_line(
    run, launches, capsys, monkeypatch, error, says
):
    failures = run / "failures.jsonl"
    failures.write_text(json.dumps({"event": "failure", "error": "of another launch"}) + "\n")

    def fail(*args, **keywords):
        with failures.open("a") as file:
            for event, text in (("failure", "an earlier one"), ("failure", error), ("in_world", "no end")):
                if error is not None:
                    file.write(json.dumps({"event": event, "error": text}) + "\n")
            file.write('{"event": "fail')
        return 1

    monkeypatch.setattr(launch, "launch", fail)
    assert cli.main(["train", "--resume", str(run)]) == 1
    *above, last = capsys.readouterr().err.splitlines()
    assert "to continue it" in last and above == ([f"hpcflow: cause: {says}"] if says else [])


@pytest.mark.parametrize(
    "argv, says",
    [
        (["train", TINY, "iterations=0"], "iterations=0: must be at least 1"),
        (["train", TINY, "algorithm.batch.mini_batches=3"], "algorithm.batch.mini_batches=3: must divide"),
        (["train", TINY, "--config-dir", "nothing"], "no such folder"),
        (["train", "--resume", "nothing"], "no run directory"),
        (["report", "nothing"], "nothing"),
    ],
)
def test_a_mistake_is_one_message_and_code_2(launches, runs, capsys, monkeypatch, argv, says):
    if argv[0] == "report":
        monkeypatch.undo()
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert says in captured.err and "Traceback" not in captured.err and captured.out == ""
    assert not launches and not runs.exists()


@pytest.mark.parametrize(
    "argv", [[], ["trian"], ["train", "--fast"], ["report"], ["report", "a", "b"], ["check", "-x"]]
)
def test_a_wrong_command_line_is_refused_with_its_usage(argv, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2 and "usage: hpcflow" in capsys.readouterr().err


def test_options_may_stand_between_overrides(launches, runs, capsys):
    assert cli.main(["train", TINY, "--dry-run", "iterations=7", "seed=3"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["iterations"] == 7 and yaml.safe_load(printed)["seed"] == 3


def test_a_dry_run_prints_the_config_and_the_plan_and_leaves_nothing(launches, runs, capsys):
    assert cli.main(["train", TINY, "--dry-run", "placement=standalone", "algorithm=grpo"]) == 0
    printed = capsys.readouterr().out
    assert config.from_dict(yaml.safe_load(printed)) == config.compose(
        [TINY, "placement=standalone", "algorithm=grpo"]
    )
    plan = [line for line in printed.splitlines() if line.startswith("#")]
    assert plan[0] == "# 5 ranks: 0 controller, 1 recorder"
    assert "#   pool reference, ranks 3-3: reference" in plan and "mpiexec" in plan[-1]
    assert not launches and not runs.exists()


def test_check(capsys, monkeypatch):
    assert cli.main(["check", TINY]) == 0
    assert "4 ranks: 0 controller, 1 recorder\n  pool all, ranks 2-3: actor" in capsys.readouterr().out
    assert cli.main(["check", TINY, "seed=-1", "run.kep=1"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert cli.main(["check", TINY, "algorithm.batch.mini_batches=3", "name=a/b"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert cli.main(["check", TINY, "iterations"]) == 2
    assert "'iterations' is not an override; works: key=value" in capsys.readouterr().err


def test_check_says_when_what_it_is_given_is_no_run_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("README.md").touch()
    Path("run").mkdir()
    for words, says in (
        (["/some/missing/dir"], "/some/missing/dir: there is no such run directory, and it is no override"),
        (["README.md"], "README.md: a file is no run directory, and it is no override"),
        (["run", "run"], "run: a run directory is checked by itself, and it is no override"),
    ):
        assert cli.main(["check", *words]) == 2
        captured = capsys.readouterr()
        assert says in captured.err and "works: one run directory alone, or key=value" in captured.err
        assert captured.out == ""


def test_memory_is_that_of_the_nodes_of_the_allocation(capsys, monkeypatch):
    small = [
        "check",
        "experiment=ppo_quickstart",
        "protocol.generation.engine=plain",
        "cluster.memory_gib=6.0",
    ]
    monkeypatch.setattr(launch, "launcher_command", lambda *_: ["srun"])
    assert cli.main(small) == 1
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert cli.main(small) == 0
    assert cli.main([*small, "cluster.launcher=mpiexec"]) == 1


@pytest.fixture
def run(launches, runs):
    cli.main(["train", TINY, "placement=split"])
    return launches.pop()[0]


def test_resume_continues_in_the_same_directory(run, launches, capsys):
    assert cli.main(["train", "--resume", str(run)]) == 0
    assert (
        cli.main(
            [
                "train",
                TINY,
                f"--resume={run}",
                "placement=colocate",
                "iterations=9",
                "protocol.training.micro_batch=2",
            ]
        )
        == 0
    )
    assert [(made[0], made[1]) for made in launches] == [(run, 4), (run, 4)]
    written = config.load(run / "config.yaml")
    assert (written.placement.name, written.iterations, written.protocol.training.micro_batch) == (
        "colocate",
        9,
        2,
    )
    assert (
        json.loads((run / "objects.json").read_text())["placement"]["sha256"]
        == config.hashes(written)["placement"]
    )
    printed = capsys.readouterr().err
    assert "changed placement: name: split -> colocate" in printed
    assert "changed protocol: training.micro_batch: 4 -> 2" in printed
    lines = [json.loads(line) for line in (run / "launches.jsonl").read_text().splitlines()]
    assert [line["resumed"] for line in lines] == [False, True, True]


@pytest.mark.parametrize(
    "overrides, says",
    [
        (["algorithm.advantage.args.lam=0.5"], "algorithm.advantage.args.lam: 0.95 -> 0.5"),
        (["algorithm=grpo"], "algorithm.name: ppo -> grpo"),
        (["model=smollm2_135m"], "models.actor.optimizer.lr: 0.001 -> 0.0001"),
        (["data=reasoning_gym"], "data.max_prompt_tokens: 64 -> 128"),
        (["seed=1", "data.system=hello"], "seed: 0 -> 1"),
        (["iterations=1"], "works: iterations=3"),
        (["experiment=ppo_quickstart"], "works: experiment=tiny"),
        (["placement.pools.policy.models=[actor]"], "reference nowhere"),
    ],
)
def test_resume_refuses_another_training(run, launches, capsys, overrides, says):
    before = (run / "config.yaml").read_text()
    assert cli.main(["train", "--resume", str(run), *overrides]) == 2
    assert says in capsys.readouterr().err
    assert not launches and (run / "config.yaml").read_text() == before


def test_a_finished_run_is_not_launched_again(run, launches, capsys):
    for name in ("iteration_2", "iteration_1", "iteration_9.tmp"):
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "complete.json").write_text("{}")
    assert cli.main(["train", "--resume", str(run)]) == 0 and not launches
    assert "all 3 iterations are done" in capsys.readouterr().out
    assert cli.main(["train", "--resume", str(run), "iterations=4"]) == 0 and len(launches) == 1


def test_a_job_branches_when_it_first_starts(run, launches, capsys, monkeypatch):
    from hpcflow.slurm import client, submission
    from hpcflow.store import RunWriter, open

    with RunWriter(run) as writer:
        for number in range(3):
            writer.commit(number, {})
    assert cli.main(["submit", "--dry-run", f"--resume={run}@2"]) == 0
    assert "-m hpcflow train --resume" in capsys.readouterr().out
    assert cli.main(["submit", "--dry-run", f"--resume={run}@4"]) == 2
    assert "@4: iteration 4 is not in the run; committed are 1 to 3" in capsys.readouterr().err
    assert cli.main(["train", "--dry-run", f"--resume={run}@2"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["experiment"] == "tiny"
    assert cli.main(["train", "--dry-run", f"--resume={run}@4"]) == 2
    captured = capsys.readouterr()
    assert "@4: iteration 4 is not in the run" in captured.err and captured.out == ""
    asked = []
    monkeypatch.setattr(submission, "refuse_problems", lambda config: None)
    monkeypatch.setattr(client, "states", lambda jobs: {})
    monkeypatch.setattr(client, "sbatch", lambda path, words, flags: asked.append(words) or "7")
    assert cli.main(["submit", f"--resume={run}@2"]) == 0
    assert asked == [["--as-submitted", f"{run}@2"]] and open(run).iterations == [0, 1, 2]
    # The job: it starts; is queued again; another one was queued again before it ever launched.
    monkeypatch.setattr(cli.job, "keep_alive", lambda run, config, once: once())
    monkeypatch.setattr(cli.job, "environment", lambda config: {})
    monkeypatch.setattr(cli, "_problems", lambda config: [])
    left = []
    for job_id, restarts in (("7", "0"), ("7", "1"), ("8", "1")):
        monkeypatch.setenv("SLURM_JOB_ID", job_id)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        assert cli.main(["train", *asked[0]]) == 0
        left.append(open(run).iterations)
        with RunWriter(run) as writer:
            writer.commit(len(left[-1]), {})
    assert left == [[0, 1], [0, 1, 2], [0, 1]] and len(launches) == 3


def test_resume_names_the_runs_that_are_there(run, capsys):
    configs = run.parent / "zconfigs"  # a config.yaml alone makes no run
    configs.mkdir()
    shutil.copy(run / "config.yaml", configs)
    for more in ("x", "x@3", "x@y"):
        assert cli.main(["train", "--resume", str(run) + more]) == 2
        said = capsys.readouterr().err
        assert f"no config.yaml in it); beside it are {run.name}\n" in said
    assert cli.main(["train", "--resume", str(configs)]) == 2
    assert f"no objects.json in it); beside it are {run.name}\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train", "submit"])
@pytest.mark.parametrize("number, given", [("-1", "-1"), ("x", "x"), ("", "nothing"), ("1.5", "1.5")])
def test_an_iteration_that_is_no_number_is_named(run, launches, capsys, name, number, given):
    assert cli.main([name, f"--resume={run}@{number}"]) == 2
    captured = capsys.readouterr()
    says = f"N in --resume=RUN@N is an iteration, {given} was given; works: --resume={run}@2"
    assert says in captured.err and captured.out == "" and not launches


@pytest.mark.parametrize("name", ["train", "submit"])
@pytest.mark.parametrize("resume", ["", " ", "@3"])
def test_an_empty_run_to_resume_is_no_new_run(launches, runs, capsys, name, resume):
    for more in ([], ["--dry-run"]):
        assert cli.main([name, "--resume", resume, TINY, *more]) == 2
        captured = capsys.readouterr()
        assert "--resume is empty; works: --resume=RUN" in captured.err and captured.out == ""
    assert not launches and not list(runs.parent.iterdir())


def test_a_run_in_use_is_refused(run, launches, capsys):
    with run_folder.locked(run):
        assert cli.main(["train", "--resume", str(run)]) == 2
    assert "in use by another launch" in capsys.readouterr().err and not launches
    assert cli.main(["train", "--resume", str(run)]) == 0


def test_a_run_that_cannot_be_written_to_is_said_and_stays_as_it_was(run, launches, capsys, tmpfs):
    there = tmpfs / run.name
    shutil.copytree(run, there)
    before = {path.name: path.read_bytes() for path in there.iterdir() if path.is_file()}
    with (tmpfs / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))
    resume = ["train", "--resume", str(there), "iterations=9"]

    def refused(why):
        assert cli.main(resume) == 2 and not launches
        said = capsys.readouterr().err
        assert f"{there} cannot be written to: {why}. What is committed in it stays" in said
        now = {path.name: path.read_bytes() for path in there.iterdir() if path.is_file()}
        assert now == before

    refused("No space left on device")
    (tmpfs / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    refused("Read-only file system")
    subprocess.run(["mount", "-o", "remount,rw", tmpfs], check=True)
    assert cli.main(resume) == 0 and len(launches) == 1


def test_runs_started_at_once_get_directories_of_their_own(tmp_path):
    tiny = config.compose([TINY, f"run.dir={tmp_path}/runs"])
    with ThreadPool(8) as pool:
        made = pool.map(lambda _: run_folder.create(tiny), range(40), chunksize=1)
    assert len(set(made)) == 40 and all((run / "config.yaml").is_file() for run in made)


def test_module_and_command_are_the_same_and_see_the_working_directory(tmp_path):
    (tmp_path / "mine.py").write_text("def reward(prompt, response, record): return 1.0\n")
    code = "import sys; from hpcflow.cli import main; sys.exit(main())"
    argv = ["check", TINY, "models.reward.function=mine:reward"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    for python in (["-c", code], ["-m", "hpcflow"]):
        done = subprocess.run(
            [sys.executable, *python, *argv], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_wheel_carries_configs_and_kernels(tmp_path):
    wheel_tools = subprocess.run(
        [sys.executable, "-c", "import setuptools.command.bdist_wheel"], capture_output=True
    )
    if wheel_tools.returncode:
        pytest.skip("this setuptools cannot build wheels; 70.1 can")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("hpcflow", "configs", "kernels"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", source)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(pip, cwd=source, check=True)
    [wheel] = tmp_path.glob("hpcflow-*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    code = (
        "import json; from hpcflow import config as c; tiny = c.compose(['experiment=tiny']);"
        "print(json.dumps([c.__file__, str(c.share('kernels')), tiny.data.train, c.hashes(tiny)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )
    file, kernels, train, hashes = json.loads(done.stdout)
    assert file.startswith(str(tmp_path)) and (Path(kernels) / "README.md").is_file()
    assert train.startswith(str(tmp_path)) and Path(train).is_file()
    assert hashes == config.hashes(config.compose([TINY]))
