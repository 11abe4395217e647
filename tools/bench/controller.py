"""What one controller costs: an empty call on 4 and 8 workers, and batches from group A to group B; against
verl on Ray.

    python tools/bench/controller.py [--verl-python PYTHON] [--workers 4 8] [--mb 1 16 128] [--json FILE]

hpcflow runs in this interpreter's environment, verl in its own (needs verl, ray, torch); without one it is
skipped. The systems take turns, in fresh processes; the printed figures are of all rounds together: median of
the medians, least of the minima.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import read_result

from hpcflow.mpi.launch import rank_environment, start

HERE = Path(__file__).parent


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verl-python", help="interpreter of an environment with verl")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--mb", type=float, nargs="*", default=[1, 16, 128])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write all figures there")
    return parser.parse_args()


def sizes(args: argparse.Namespace, workers: int) -> list[float]:
    """Megabytes to move; none, and one group only, with more than 4 workers: fewer processes."""
    return args.mb if workers <= 4 else []


def arguments(args: argparse.Namespace, workers: int) -> list[str]:
    numbers = {"--workers": workers, "--calls": args.calls, "--repeats": args.repeats}
    words = [word for name, number in numbers.items() for word in (name, str(number))]
    return [*words, "--mb", *map(str, sizes(args, workers))]


def run_hpcflow(args: argparse.Namespace, workers: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "controller_hpcflow.py"), *arguments(args, workers)]
        world = start(
            command,
            1 + workers * (2 if sizes(args, workers) else 1),
            exits=Path(folder, "exits.jsonl"),
            launcher="mpiexec",
            environment=rank_environment(1, {}),
            stdout=subprocess.PIPE,
        )
        output, _ = world.communicate()
        if world.returncode:
            raise SystemExit(f"hpcflow on {workers} workers ended with {world.returncode}")
        return output.decode()


def run_verl(args: argparse.Namespace, workers: int) -> str:
    command = [args.verl_python, str(HERE / "controller_verl.py"), *arguments(args, workers)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def combine(rounds: list[dict]) -> dict[str, tuple[float, float]]:
    """name -> (median of the medians, least of the minima) in seconds."""
    names = rounds[0]["seconds"]
    return {
        name: (
            statistics.median(r["seconds"][name]["median"] for r in rounds),
            min(r["seconds"][name]["min"] for r in rounds),
        )
        for name in names
    }


def main() -> None:
    args = parse()
    systems = {"hpcflow": run_hpcflow}
    if args.verl_python:
        systems["verl"] = run_verl
    else:
        print("verl: skipped (name an interpreter that has it: --verl-python)")
    everything = {}
    for workers in args.workers:
        found: dict[str, list[dict]] = {name: [] for name in systems}
        for _ in range(args.rounds):
            for name, run in systems.items():
                found[name].append(read_result(run(args, workers)))
        everything[workers] = found
        table = {name: combine(rounds) for name, rounds in found.items()}
        loads = ", ".join(
            f"{name} {'/'.join(format(r['load'], '.1f') for r in rounds)}" for name, rounds in found.items()
        )
        print(
            f"\n{workers} workers a group; milliseconds, median (min); load average after each round: {loads}"
        )
        header = ["", *table, *(["median ratio", "min ratio"] if len(table) > 1 else [])]
        print("  ".join(f"{cell:>24}" for cell in header))
        for name in table["hpcflow"]:
            cells = [f"{1000 * table[s][name][0]:.2f} ({1000 * table[s][name][1]:.2f})" for s in table]
            if len(table) > 1:
                cells += [f"{table['hpcflow'][name][k] / table['verl'][name][k]:.3f}" for k in (0, 1)]
            print("  ".join(f"{cell:>24}" for cell in [name, *cells]))
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
