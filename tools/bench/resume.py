"""What a crash costs: seconds to go on, split by part; replay against generating again; the store's
throughput.

    python tools/bench/resume.py [--iterations 12] [--prompts 64] [--tokens 64] [--rows 256] [--text 4096]

Whole runs on real MPI ranks (2 workers, a small random model), killed by SIGKILL. Times are seconds of this
machine.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hpcflow.data.columns import Columns, Ragged, nbytes  # noqa: E402
from hpcflow.store import RunWriter, read_lines  # noqa: E402
from hpcflow.store import open as open_run  # noqa: E402
from hpcflow.store.checkpoint import latest  # noqa: E402


def train(*words: str) -> tuple[int, str, float]:
    """``hpcflow train``: (exit code, output, seconds)."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "hpcflow", "train", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, time.perf_counter() - start


def begin(folder: Path, args: argparse.Namespace) -> Path:
    """A run with one checkpoint in the middle, as if killed after its last commit."""
    code, text, _ = train(
        "experiment=tiny",
        f"run.dir={folder}",
        f"iterations={args.iterations}",
        f"algorithm.batch.prompts={args.prompts}",
        f"algorithm.sampling.max_tokens={args.tokens}",
        "run.checkpoint_every=0",
    )
    if code:
        raise SystemExit(text)
    (run,) = folder.iterdir()
    shutil.rmtree(run / "checkpoints")  # of which there was none before the end
    return run


def resume(run: Path, iterations: int) -> None:
    """Go on with one more iteration; print where the time went."""
    before = {number: open_run(run).iteration(number) for number in open_run(run).iterations}
    began = time.time()
    code, text, seconds = train("--resume", str(run), f"iterations={iterations + 1}")
    if code:
        raise SystemExit(text)
    replayed = [line for line in text.splitlines() if " replayed in " in line]
    decided = [entry for entry in read_lines(run / "failures.jsonl") if entry["event"] == "resume"][-1]
    last = open_run(run).iteration(iterations)
    replay = last.facts["start"] - decided["time"]
    original = sum(found.facts["wall_s"] for found in before.values())
    parts = {
        "start of all ranks, loading models": decided["time"] - began,
        f"replay of {len(replayed)} iterations": replay,
        "the new iteration": last.facts["wall_s"],
        "checkpoint, report, end": began + seconds - last.facts["start"] - last.facts["wall_s"],
    }
    print(f"\nresume after a kill, {len(before)} iterations after the last checkpoint: {seconds:.1f} s")
    for name, value in parts.items():
        print(f"  {name:38} {value:7.2f} s")
    share = sum(
        node["end"] - node["start"]
        for found in before.values()
        for node in found.nodes
        if node["method"] == "generate_sequences"
    )
    print(
        f"  computed at first in {original:.2f} s (generation {share:.2f} s): replay is "
        f"{original / replay:.1f} x faster"
    )
    print(f"  {replayed[-1]}")


def kills(folder: Path, count: int) -> None:
    """SIGKILL the whole run at growing instants, then let it end."""
    words = ["experiment=tiny", f"run.dir={folder}", "iterations=6", "run.checkpoint_every=2"]
    survived, run = 0, None
    for number in range(count):
        command = [sys.executable, "-m", "hpcflow", "train", *(["--resume", str(run)] if run else words)]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for line in process.stdout:
            if line.startswith("iteration ") and " left " in line:
                time.sleep(0.1 * number)
                break
        process.kill()
        process.wait()
        (run,) = folder.iterdir()
        survived += open_run(run).skipped == {}
        if len(open_run(run).iterations) == 6:
            break
    code, text, _ = train("--resume", str(run))
    if code or open_run(run).iterations != list(range(6)):
        raise SystemExit(text)
    print(f"\nkills of the whole run: {survived} survived of {number + 1}; it ended with all 6 iterations")
    print(f"  {latest(run).meta['digests']}")


def store(folder: Path, rows: int, text: int) -> None:
    """Recording and committing, with drafts, as a run does."""
    lengths = torch.full((rows,), text // 16)
    tokens = Ragged(torch.randint(0, 1000, (int(lengths.sum()),)), lengths)
    floats = tokens.like(torch.rand(len(tokens.values)))
    columns: Columns = {"prompt_ids": tokens, "response_ids": tokens, "reward": torch.rand(rows)}
    columns |= {
        name: floats for name in ("old_log_probs", "ref_log_probs", "values", "advantages", "returns")
    }
    size, rounds = sum(nbytes(column) for column in columns.values()), 30
    folder.mkdir()
    with RunWriter(folder) as writer:
        start = time.perf_counter()
        for iteration in range(rounds):
            ids = torch.arange(rows) + rows * iteration
            stamps = dict.fromkeys(columns, (iteration, "m", iteration))
            writer.record(iteration, ids, columns, stamps, draft=True)
            writer.commit(iteration, {})
        seconds = time.perf_counter() - start
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(
        f"\nstore, {rows} samples of {size / rows / 1024:.1f} KiB an iteration, draft and commit, each flushed to "
        "the disk:"
    )
    print(f"  {rounds / seconds:.1f} iterations/s, {rounds * size / seconds / 1e6:.0f} MB/s of columns")
    print(f"  {disk / rounds / rows:.0f} bytes a sample on disk ({disk / rounds / size:.3f} x the columns)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--text", type=int, default=4096)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpcflow-resume-") as name:
        folder = Path(name)
        store(folder / "store", args.rows, args.text)
        resume(begin(folder / "replay", args), args.iterations)
        kills(folder / "kills", args.kills)


if __name__ == "__main__":
    main()
