"""The ``hpcflow`` command: train, submit, check, report.

Every command but the training itself runs without torch until it has to read a run. A user's mistake is one
message on stderr and exit code 2, never a traceback.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcflow.config import Config, compose, dump, load
from hpcflow.schema import ConfigError, Problem
from hpcflow.slurm import job

DESCRIPTION = "RL post-training of large language models as Slurm-native batch jobs."
ANYWHERE = 1 << 30  # nodes: memory of this machine does not matter
OVERRIDES = "key=value or group=choice, e.g. experiment=ppo_quickstart iterations=2 placement=split"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own); returns the exit code."""
    # The ranks are started with -m and see the working directory: what is found here must be what they find.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    args = _parse(argv)
    try:
        return args.command(args)
    except ValueError as error:
        print(f"hpcflow {args.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def train(args: argparse.Namespace) -> int:
    """Start a run, or continue one with ``--resume``; 0, or the code that the first bad rank left."""
    if args.multirun:
        from hpcflow.slurm import sweep

        if args.resume is not None or args.dry_run or args.as_submitted:
            raise ValueError(
                "-m starts one run per point, and continues those that it began; works: without other options"
            )
        return sweep.run(args.overrides, args.config_dir, at_once=args.at_once)
    args.resume, branch = _split(args.resume)
    if args.as_submitted:
        args.as_submitted, branch = _split(args.as_submitted)
    if branch is not None and job.restarted() and job.launched(Path(args.as_submitted or args.resume)):
        branch = None  # this job branched when it first started, and goes on from there
    resume, config = _to_train(args)
    _refuse_problems(config)
    from hpcflow import run_folder

    if args.dry_run:
        if branch is not None:
            run_folder.refuse_branch(resume, branch)
        print(dump(config) + _commented(_plan(config)))
        return 0
    from hpcflow.check_models import import_problems

    if problems := list(import_problems(config)):
        raise ConfigError(problems)
    if resume and branch is None and run_folder.complete(resume, config):
        print(f"{resume}: all {config.iterations} iterations are done; to go on, add iterations=<more>")
        return 0
    run = resume.absolute() if resume else run_folder.create(config)
    with run_folder.locked(run):
        if branch is not None:
            print(run_folder.branch(run, branch))
        if resume:
            run_folder.write_config(run, config)
        print(f"run directory {run}", flush=True)
        return _launched(run, config, resumed=resume is not None)


def submit(args: argparse.Namespace) -> int:
    """Submit a run as one heterogeneous Slurm job, or the continuation of one with ``--resume``."""
    from hpcflow.slurm import script, submission, sweep

    if args.multirun and not args.dry_run:
        raise ValueError("-m is for --dry-run; works: hpcflow train -m, which submits one job per point")
    resume, branch = _split(args.resume)
    words, run = args.overrides, None if resume is None else Path(resume).absolute()
    if args.multirun:
        config = compose(sweep.points(words)[0], args.config_dir)
    else:
        config = compose(words, args.config_dir) if run is None else _resumed(run, words, args.config_dir)
    if branch is not None:
        from hpcflow import run_folder

        run_folder.refuse_branch(run, branch)
    if args.dry_run:
        if args.multirun:
            text = script.sweep_text(config, words)
        else:
            text = script.text(config, words) if run is None else script.resume_text(config)
        folder = submission.write(config, text)
        print(text, end="")
        print(f"hpcflow submit: {folder} holds this script and the resolved config", file=sys.stderr)
        return 0
    if args.test_only:
        print(submission.try_out(config, args.overrides))
        return 0
    number, run = submission.submit(config, args.overrides, run, branch)
    print(f"submitted job {number}\nrun directory {run}\nfollow it: tail -F {run}/job/{number}_0_log.out")
    return 0


def check(args: argparse.Namespace) -> int:
    """Print every breach of a config, or all damage in a run directory, and exit 1; else the launch plan
    and exit 0.
    """
    if len(args.overrides) == 1 and Path(args.overrides[0]).is_dir():
        from hpcflow.store.verification import verify

        lines, well = verify(Path(args.overrides[0]))
        print("\n".join(lines))
        return 0 if well else 1
    for word in args.overrides:
        if "=" not in word and (os.sep in word or Path(word).exists()):
            raise ValueError(
                f"{word}: {_no_run(Path(word))}, and it is no override; "
                "works: one run directory alone, or key=value"
            )
    try:
        config = compose(args.overrides, args.config_dir)
        problems = _problems(config)
    except ConfigError as error:
        problems = error.problems
    if problems:
        print("\n".join(map(str, problems)))
        return 1
    print(_plan(config))
    return 0


def report(args: argparse.Namespace) -> int:
    """Print the report of a run; its curves are drawn into RUN/report."""
    from hpcflow.report import report as report_of

    print(report_of(args.run), end="")
    return 0


def _to_train(args: argparse.Namespace) -> tuple[Path | None, Config]:
    """The run directory to continue in, if any, and the config."""
    if args.as_submitted:  # the script's own overrides are in the run's config already
        return Path(args.as_submitted), load(Path(args.as_submitted) / "config.yaml")
    if args.resume is not None:
        return Path(args.resume), _resumed(Path(args.resume), args.overrides, args.config_dir)
    config = compose(args.overrides, args.config_dir)
    begun = job.find_run(Path(config.run.dir).expanduser()) if job.restarted() else None
    return begun, load(begun / "config.yaml") if begun else config


def _split(resume: str | None) -> tuple[str | None, int | None]:
    """``RUN@N`` -> (RUN, N); a folder whose own name ends so is a folder. ValueError for an empty RUN, and an
    N that is no number.
    """
    if resume is None:
        return None, None
    if not resume.partition("@")[0].strip() and not (resume and Path(resume).is_dir()):
        # As "$RUN" is where RUN is not set: never a new run.
        raise ValueError("--resume is empty; works: --resume=RUN, a run directory, or --resume=RUN@2")
    run, at, number = resume.rpartition("@")
    if not at or Path(resume).is_dir():
        return resume, None
    if re.fullmatch("[0-9]+", number):
        return run, int(number)
    if _missing(Path(run)) is None:
        raise ValueError(
            f"N in --resume=RUN@N is an iteration, {number or 'nothing'} was given; works: --resume={run}@2"
        )
    return resume, None


def _no_run(path: Path) -> str:
    if path.is_dir():
        return "a run directory is checked by itself"
    return "a file is no run directory" if path.exists() else "there is no such run directory"


def _missing(run: Path) -> str | None:
    """The name of the first file without which ``run`` is no run directory; None when it is one."""
    return next((n for n in ("config.yaml", "objects.json") if not (run / n).is_file()), None)


def _launched(run: Path, config: Config, resumed: bool) -> int:
    from hpcflow import run_folder
    from hpcflow.mpi.launch import launch

    before = 0

    def once() -> int:
        nonlocal resumed, before
        before = run_folder.size(run / "failures.jsonl")
        run_folder.record_launch(run, config, resumed=resumed)
        resumed = True
        cluster = config.cluster
        return launch(
            run,
            config.world_size,
            launcher=cluster.launcher,
            slurm=cluster.slurm,
            threads_per_rank=cluster.threads_per_rank,
            env={**job.environment(config), **cluster.env},
        )

    code = job.keep_alive(run, config, once) if job.inside() else once()
    if code:
        # mpiexec's banner has moved it off the screen.
        if cause := run_folder.cause(run, before):
            print(f"hpcflow: cause: {cause}"[:300], file=sys.stderr)
        again = shlex.join(["hpcflow", "train", "--resume", str(run)])
        print(f"hpcflow train: the run ended with exit code {code}; to continue it: {again}", file=sys.stderr)
        return code
    # Only now: it imports torch, and this process waits for hours.
    from hpcflow.report import report as report_of

    print(report_of(run), end="")
    return 0


def _resumed(run: Path, overrides: list[str], config_dir: str | None) -> Config:
    """The config with which ``run`` continues. ValueError when it would not be the same training any more."""
    from hpcflow import run_folder
    from hpcflow.compose import overlay

    if missing := _missing(run):
        beside = run.parent.glob("*/config.yaml") if run.parent.is_dir() else ()
        siblings = sorted(path.parent.name for path in beside if _missing(path.parent) is None)
        hint = f"; beside it are {', '.join(siblings[-3:])}" if siblings else ""
        raise ValueError(f"--resume={run}: there is no run directory (no {missing} in it){hint}")
    old = load(run / "config.yaml")
    config = overlay(run / "config.yaml", overrides, config_dir)
    changed = run_folder.changes(old, config)
    if changed["algorithm"]:
        raise ValueError(
            f"--resume={run}: another training than the one that was begun; these keys changed:\n  "
            + "\n  ".join(changed["algorithm"])
            + "\nleave them out, or start a new run without --resume"
        )
    for name in ("protocol", "placement"):
        for change in changed[name]:
            print(f"changed {name}: {change}", file=sys.stderr)
    if config.iterations < old.iterations:
        raise ValueError(
            f"iterations={config.iterations}: the run was begun with {old.iterations}; it may only grow, "
            f"works: iterations={old.iterations}"
        )
    return config


def _refuse_problems(config: Config) -> None:
    problems = _problems(config)
    if problems:
        raise ConfigError(problems)


def _problems(config: Config) -> list[Problem]:
    """Breaches of a run on the machines at hand; of one that asks for GPUs, on those of its job."""
    from hpcflow.check import check as problems_of
    from hpcflow.slurm import components, site

    if "SLURM_HET_SIZE" not in os.environ and not any(c.gpus for c in config.cluster.components.values()):
        return problems_of(config, nodes=_nodes(config))
    problems = [*components.component_problems(config), *problems_of(config, nodes=ANYWHERE)]
    return problems or list(site.memory_problems(config))


def _nodes(config: Config) -> int:
    """Nodes over which the ranks will be spread: those of the Slurm allocation, or this machine."""
    if config.cluster.launcher == "mpiexec" or "SLURM_JOB_ID" not in os.environ:
        return 1
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))


def _plan(config: Config) -> str:
    """Which rank does what, with how much memory, started by which command."""
    from hpcflow.check_machine import machine_memory_gib
    from hpcflow.estimate import model_facts, rank_memory, total_memory
    from hpcflow.mpi.launch import launcher_command

    pools = config.placement.pools
    facts = {
        name: model_facts(config.models[name].path)
        for pool in pools.values()
        for name in pool.models
        if config.models[name].path is not None
    }
    nodes, available = _nodes(config), config.cluster.memory_gib or machine_memory_gib()
    lines = [f"{config.world_size} ranks: 0 controller, 1 recorder"]
    gpu = any(component.gpus for component in config.cluster.components.values())
    memory = rank_memory(config, facts, gpu=gpu)
    for name, ranks in config.placement.ranks().items():
        parts = ", ".join(f"{what} {gib:.2f}" for what, gib in memory[name].items() if gib >= 0.005)
        lines.append(f"  pool {name}, ranks {ranks.start}-{ranks.stop - 1}: {', '.join(pools[name].models)}")
        lines.append(f"    {sum(memory[name].values()):.2f} GiB a rank: {parts}")
    needed = total_memory(config, facts) / nodes
    if gpu:
        lines.append(f"memory: of the {config.cluster.gpu_memory_gib:g} GiB of each rank's GPU")
    else:
        lines.append(f"memory: about {needed:.1f} of {available:.1f} GiB on a node (of {nodes})")
    cluster = config.cluster
    lines.append(
        "started by: " + shlex.join(launcher_command(cluster.launcher, config.world_size, cluster.slurm))
    )
    return "\n".join(lines)


def _commented(text: str) -> str:
    return "".join(f"# {line}\n" for line in text.splitlines())


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("hpcflow", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="name", required=True, metavar="train|submit|check|report")
    for name, command in (("train", train), ("submit", submit), ("check", check)):
        sub = commands.add_parser(name, help=command.__doc__.partition(";")[0], description=command.__doc__)
        sub.set_defaults(command=command)
        sub.add_argument("overrides", nargs="*", help=OVERRIDES)
        sub.add_argument("--config-dir", metavar="DIR", help="config groups of your own, searched first")
        if name != "check":
            help = "continue this run directory, with @N as after iteration N"
            sub.add_argument("--resume", metavar="RUN[@N]", help=help)
            sub.add_argument(
                "-m", "--multirun", action="store_true", help="one run for each point of key=a,b,c"
            )
        if name == "train":
            sub.add_argument(
                "--dry-run", action="store_true", help="print resolved config and launch plan, and exit"
            )
            sub.add_argument(
                "--at-once", type=int, default=4, metavar="N", help="points of -m at one time (default 4)"
            )
            sub.add_argument("--as-submitted", metavar="RUN[@N]", help=argparse.SUPPRESS)
        if name == "submit":
            sub.add_argument(
                "--dry-run", action="store_true", help="write script and resolved config, and exit"
            )
            sub.add_argument(
                "--test-only", action="store_true", help="ask Slurm whether and when it would start"
            )
    sub = commands.add_parser("report", help="print the report of a run", description=report.__doc__)
    sub.set_defaults(command=report)
    sub.add_argument("run", metavar="RUN")
    # Options may stand between overrides; argparse leaves what follows them as unknown.
    args, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-") or "overrides" not in args]
    if unknown:
        commands.choices[args.name].error(f"unknown: {' '.join(unknown)}")
    if rest:
        args.overrides += rest
    return args
