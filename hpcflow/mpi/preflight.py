"""What a rank checks before anything expensive: the world is whole, and the GPUs that were asked for are
there.

The launch says what to expect by HPCFLOW_WORLD (ranks) and HPCFLOW_GPUS (``count:gpus`` of consecutive
ranks, e.g. ``2:0,16:1``). A site's MPI that does not go with its srun gives every rank a world of its own,
without an error.
"""

from __future__ import annotations

import os
import re
import subprocess

from hpcflow.mpi import guard


def check_gpus() -> None:
    """ValueError when this rank's node shows it fewer GPUs than its job asked for. Sets LOCAL_RANK.

    Every rank sees all GPUs of its component on the node and takes the one of its place there: binding each
    rank to a single one would cut peer-to-peer copies on some machines.
    """
    rank, local = guard.rank() or 0, int(os.environ.get("SLURM_LOCALID", "0"))
    os.environ.setdefault("LOCAL_RANK", str(local))
    wanted = gpus_of(rank, os.environ.get("HPCFLOW_GPUS", ""))
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if wanted and len(seen) < (local + 1) * wanted:
        raise ValueError(
            f"rank {rank} (the {local + 1}. of its component on "
            f"{os.environ.get('SLURMD_NODENAME', 'this node')}) needs {wanted} GPU of its own, but "
            f"CUDA_VISIBLE_DEVICES={','.join(seen) or '(empty)'}: "
            f"the job must ask for --gpus-per-node, cluster.components.*.gpus={wanted}"
        )


def check_world(size: int) -> None:
    """ValueError unless MPI says that the world has as many ranks as were launched."""
    expected = int(os.environ.get("HPCFLOW_WORLD", size))
    if size != expected:
        flavours = _flavours()
        raise ValueError(
            f"{expected} ranks were started, but MPI says the world has {size}: srun and this MPI library "
            f"do not find each other; works: another cluster.slurm.mpi{flavours}"
        )


def gpus_of(rank: int, spans: str) -> int:
    """``gpus_of(3, "2:0,16:1")`` = 1; 0 for ranks beyond the last span."""
    for span in filter(None, spans.split(",")):
        count, gpus = map(int, span.split(":"))
        if rank < count:
            return gpus
        rank -= count
    return 0


def _flavours() -> str:
    """What srun on this machine offers, as an addition to a sentence."""
    try:
        said = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    names = re.findall(r"\b(?:pmi\w*|cray\w*|openmpi|none)\b", said.stdout + said.stderr)
    return f" (srun knows {', '.join(dict.fromkeys(names))})" if names else ""
