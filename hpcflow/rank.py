"""One rank of a run's MPI world: ``python -m hpcflow.rank RUN``.

Rank 0 is the controller, rank 1 the recorder, the others are workers; what a worker hosts it learns by message.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path


def main(run: Path) -> int:
    """Be this rank of the run in directory ``run`` until the world ends. Returns the exit code.

    A failing controller ends the world: the others leave when its connections close, the guards see to the rest.
    """
    from hpcflow.dataflow.world import rank_from_environment

    return _control(run) if rank_from_environment() == 0 else _serve(run)


def _control(run: Path) -> int:
    from hpcflow.config import load
    from hpcflow.dataflow.session import Session
    from hpcflow.mpi.controller import Interrupted, WorkerError

    try:
        Session(run, load(run / "config.yaml")).train()
    except (WorkerError, Interrupted, ValueError) as error:
        print(f"hpcflow: {type(error).__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    return 0


def _serve(run: Path) -> int:
    from hpcflow.data import rewards

    rewards.prepare()  # processes that run verifiers must not descend from an MPI rank
    from hpcflow.mpi.worker import catch_signals
    from hpcflow.workers.host import serve

    read_end, write_end = catch_signals(())
    code = serve(read_end)
    write_end.close()
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
