"""The run directory: everything a run leaves behind, and all that is needed to continue it.

config.yaml        the resolved configuration
objects.json       algorithm, protocol and placement: content and sha256 of each
iterations/        one immutable HDF5 file per committed iteration, merged in tiers (`schema`, `segments`)
drafts/            what is recorded of the iteration in progress (`drafts`)
checkpoints/       weights and optimisers, one folder per checkpoint (`checkpoint`)
journal.jsonl      the nodes of the iteration in progress (`hpcflow.dataflow.journal`)
failures.jsonl     one line per failure that a controller saw or a call made good inside the living world,
                   and per decision what to run again
launches.jsonl     one line per launch: time, host, argv, world, versions of packages
exits.jsonl        one line per rank that ended: rank, pid, exit or signal, time
evals.jsonl        one line per evaluation on held-out prompts: when, reward_mean, reward_se, samples
report/            text and curves of `hpcflow report`
"""

from hpcflow.store.checkpoint import Checkpoint, CheckpointDir, latest
from hpcflow.store.durable import append_line, read_lines, require_space, write_atomic
from hpcflow.store.reader import GENERATED, Iteration, Lineage, Run
from hpcflow.store.reader import open_run as open
from hpcflow.store.schema import NewerSchema, Unreadable
from hpcflow.store.writer import RunWriter

__all__ = [
    "GENERATED",
    "Checkpoint",
    "CheckpointDir",
    "Iteration",
    "Lineage",
    "NewerSchema",
    "Run",
    "RunWriter",
    "Unreadable",
    "append_line",
    "latest",
    "open",
    "read_lines",
    "require_space",
    "write_atomic",
]
