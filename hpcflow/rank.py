"""One rank of a run's MPI world: ``python -m hpcflow.rank RUN``.

Rank 0 is the controller, rank 1 the recorder, the others are workers; what a worker hosts it learns by message.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from hpcflow.dataflow import stopping
from hpcflow.mpi import guard, preflight


def main(run: Path) -> int:
    """Be this rank of the run in directory ``run`` until the world ends. Returns the exit code.

    A failing controller ends the world: the others leave when its connections close, the guards see to the rest.
    """
    rank = guard.rank()
    if rank is None:
        raise ValueError("this process is no MPI rank; start it with `hpcflow train` or mpiexec")
    stopping.listen(controls=rank == 0)
    try:
        preflight.check_gpus()
    except ValueError as error:
        return _say(error)
    return _control(run) if rank == 0 else _serve(run)


def _control(run: Path) -> int:
    from hpcflow.config import load
    from hpcflow.dataflow.session import Session
    from hpcflow.mpi.controller import WorkerError

    try:
        Session(run, load(run / "config.yaml")).train()
    except stopping.Interrupted as error:
        os._exit(_say(error, error.code))
    except (WorkerError, ValueError) as error:
        os._exit(_say(error))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    return 0


def _say(error: Exception, code: int = 1) -> int:
    print(f"hpcflow: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return code


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
