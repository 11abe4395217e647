"""Whether a run directory still holds what was written: every byte of iterations, drafts and checkpoints is
read.
"""

from __future__ import annotations

from pathlib import Path

from hpcflow.store.checkpoint import CheckpointDir
from hpcflow.store.drafts import Drafts
from hpcflow.store.reader import Run


def verify(run: Path) -> tuple[list[str], bool]:
    """(lines for a person, whether all is well). ValueError when ``run`` is no run directory.

    Not well: content that differs from what was written, or cannot be read. Leftovers of a kill and what a
    branch superseded are named, and are well.
    """
    reader = Run(run)
    damage = reader.skipped | reader.damage()
    lines = [_iterations(reader)]
    directory = CheckpointDir(run)
    for checkpoint in directory.complete():
        name = f"checkpoints/{checkpoint.folder.name}"
        wrong = checkpoint.damage()
        damage |= {f"{name}/{path}": why for path, why in wrong.items()}
        if not wrong:
            size = sum(size for size, _ in checkpoint.files.values())
            after = f"state after iteration {checkpoint.iteration + 1}"
            lines.append(f"{name}: {after}, {size / 2**20:.1f} MiB, as written")
    for name, why in directory.skipped.items():
        if why.startswith(("damaged", "incomplete")):
            damage[f"checkpoints/{name}"] = why
        else:
            lines.append(f"checkpoints/{name} does not count: {why}")
    drafts = Drafts(run)
    first = max(reader.iterations, default=-1) + 1
    if found := drafts.load(first):
        columns = sum(len(recording.columns) for recording in found)
        lines.append(f"drafts: {columns} columns of iteration {first + 1}, which is not committed")
    damage |= {f"drafts/{name}": why for name, why in drafts.skipped.items()}
    return [*lines, *(f"DAMAGED {name}: {why}" for name, why in damage.items())], not damage


def _iterations(reader: Run) -> str:
    done = reader.iterations
    text = f"iterations: {len(done)} committed"
    if done and done != list(range(len(done))):
        missing = sorted(set(range(done[-1])) - set(done))
        text += f", up to {done[-1] + 1}; missing: {', '.join(str(i + 1) for i in missing[:8])}"
    old = len(reader.superseded)
    return text + (f"; {old} more superseded by a branch" if old else "")
