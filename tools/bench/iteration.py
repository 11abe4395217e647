"""Seconds and tokens per second of one PPO- and one GRPO-shaped iteration on a tiny Llama; against TRL.

    python tools/bench/iteration.py [--trl-python PYTHON] [--trl-ppo-path FOLDER] [--ranks 1] [--json FILE]

Both load the same folder: a random Llama of 4 layers, hidden size 128, 512 words, float32. 32 responses an
iteration (PPO: 32 prompts; GRPO: 8 prompts, 4 draws) of 32 tokens to prompts of 16, KL 0.04, one epoch, one
mini-batch, one thread a rank, the reward a rule. ``--ranks``: worker ranks that hpcflow's models share; TRL
is one process. TRL's PPO is in versions up to 1.12: --trl-ppo-path names a folder with one (``pip install
--no-deps --target FOLDER trl==1.12.0``). The systems take turns; the first iterations are left out. hpcflow's
ends with the record on disk, TRL's records nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

from measure import read_result
from rule import VOCABULARY

from hpcflow.data.models import resolve_model
from hpcflow.store import open as open_run

HERE = Path(__file__).parent.absolute()
MODEL = f"random:llama?vocab_size={VOCABULARY}&hidden_size=128&layers=4&heads=4&kv_heads=4&seed=0&vocab=words"
PROMPTS, PROMPT_WORDS, NEW_TOKENS, WARM = 1024, 16, 32, 2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL")
    parser.add_argument("--trl-ppo-path", help="folder with a TRL that still has PPO")
    parser.add_argument("--algorithms", nargs="+", default=["ppo", "grpo"], choices=["ppo", "grpo"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--engine", default="vllm", choices=["vllm", "plain"], help="hpcflow's generation engine"
    )
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write all figures there")
    return parser.parse_args()


def write_prompts(path: Path) -> None:
    draw = random.Random(1)
    lines = [
        " ".join(f"t{draw.randrange(4, VOCABULARY)}" for _ in range(PROMPT_WORDS)) for _ in range(PROMPTS)
    ]
    path.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))


def run_hpcflow(args: argparse.Namespace, algorithm: str, ranks: int, folder: Path) -> dict:
    batch = {
        "ppo": "{prompts: 32, draws: 1, mini_batches: 1, epochs: 1}",
        "grpo": "{prompts: 8, draws: 4, mini_batches: 1, epochs: 1}",
    }[algorithm]
    kl = {"ppo": "algorithm.advantage.args.kl_coef=0.04", "grpo": "algorithm.policy_loss.args.kl_coef=0.04"}[
        algorithm
    ]
    overrides = [
        "experiment=tiny",
        f"algorithm={algorithm}",
        f"name={algorithm}",
        f"iterations={args.iterations}",
        kl,
        f"algorithm.batch={batch}",
        f"algorithm.sampling.max_tokens={NEW_TOKENS}",
        f"placement.pools.all.ranks={ranks}",
        # One update an iteration, so GRPO's ratio is 1: like TRL's, it makes no pass for the old log-probs.
        f"algorithm.old_log_probs={'rollout' if algorithm == 'grpo' else 'recompute'}",
        "protocol.training.micro_batch=32",
        f"protocol.generation.engine={args.engine}",
        "data.eval=null",
        f"data.train={folder / 'prompts.jsonl'}",
        "models.reward.function=rule:share_of_low_words",
        "models.reward.processes=1",
        "models.actor.optimizer.lr=1e-6",
        "models.critic.optimizer.lr=1e-6",
        f"models.actor.path='{MODEL}'",
        f"models.critic.path='{MODEL}'",
        f"models.reference.path='{MODEL}'",
        f"run.dir={folder / 'runs'}",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    quiet([sys.executable, "-m", "hpcflow", "train", *overrides], environment)
    newest = max((folder / "runs").iterdir(), key=lambda run: run.stat().st_mtime)
    run = open_run(newest)
    found = [run.iteration(number) for number in run.iterations]
    tokens = [int(each.columns["response_ids"].lengths.sum()) for each in found]
    starts = [each.facts["start"] for each in found]
    wall = [after - before for before, after in pairwise(starts)]  # the commit to disk included
    return {"wall": wall, "tokens": tokens[:-1]}


def quiet(command: list[str], environment: dict[str, str]) -> str:
    """Run it and return its output; when it fails, end with what it said."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def run_trl(args: argparse.Namespace, algorithm: str, folder: Path, model: str) -> dict:
    environment = {**os.environ, **({"PYTHONPATH": args.trl_ppo_path} if algorithm == "ppo" else {})}
    command = [
        args.trl_python,
        str(HERE / "iteration_trl.py"),
        algorithm,
        model,
        str(folder / "prompts.jsonl"),
        str(args.iterations),
    ]
    return read_result(quiet(command, environment))


def row(name: str, rounds: list[dict]) -> list[str]:
    wall = [seconds for each in rounds for seconds in each["wall"][WARM:]]
    tokens = [count for each in rounds for count in each["tokens"][WARM:]]
    rates = [count / seconds for count, seconds in zip(tokens, wall, strict=True)]
    load = "/".join(f"{each['load']:.1f}" for each in rounds)
    return [
        name,
        f"{statistics.median(wall):.3f}",
        f"{min(wall):.3f}",
        f"{statistics.median(rates):.0f}",
        f"{max(rates):.0f}",
        load,
    ]


def compare(args: argparse.Namespace, algorithm: str, folder: Path, model: str) -> dict[str, list[dict]]:
    """Each system's rounds, taken in turns."""
    systems: dict[str, Callable[[], dict]] = {}
    for ranks in args.ranks:
        systems[f"hpcflow, {ranks} rank(s)"] = partial(run_hpcflow, args, algorithm, ranks, folder)
    if not args.trl_python:
        print("TRL: skipped (name an interpreter that has it: --trl-python)")
    elif algorithm == "ppo" and not args.trl_ppo_path:
        print("TRL's PPO: skipped (name a folder with TRL 1.12: --trl-ppo-path)")
    else:
        systems["TRL"] = partial(run_trl, args, algorithm, folder, model)
    found: dict[str, list[dict]] = {system: [] for system in systems}
    for _ in range(args.rounds):
        for system, run in systems.items():
            found[system].append({**run(), "load": os.getloadavg()[0]})
    return found


def main() -> None:
    args = parse()
    everything = {}
    with tempfile.TemporaryDirectory(prefix="hpcflow-bench-") as name:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl")
        model = str(resolve_model(MODEL))
        for algorithm in args.algorithms:
            everything[algorithm] = found = compare(args, algorithm, folder, model)
            print(f"\n{algorithm}: 32 responses of up to {NEW_TOKENS} tokens")
            header = ["", "s/iteration", "(min)", "tokens/s", "(max)", "load"]
            for cells in [header, *(row(system, rounds) for system, rounds in found.items())]:
                print("".join(f"{cell:>18}" for cell in cells))
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
