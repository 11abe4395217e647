"""Parts of runs that misbehave: a slow reward, a critic that fails, dies or hangs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from hpcflow.data.columns import Columns
from hpcflow.workers.critic import Critic
from hpcflow.workers.primitive import Rows, primitive
from tests.training.judges import lower_half


def slow_lower_half(prompt: str, response: str, record: dict[str, Any], pause: float) -> float:
    """The reward of the other tests, after ``pause`` seconds."""
    time.sleep(pause)
    return lower_half(prompt, response, record)


class BadCritic(Critic):
    """In the third iteration it raises, dies or hangs, as MISBEHAVE says; once, when ONCE names a file,
    else always.
    """

    @primitive("3D_PROTO", reads=("prompt_ids", "response_ids"), writes=("values",))
    def compute_values(self, rows: Rows) -> Columns:
        how, once = os.environ.get("MISBEHAVE"), os.environ.get("ONCE")
        if how and rows.iteration == 2 and not (once and Path(once).exists()):
            if once:
                Path(once).touch()
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hang":
                time.sleep(3600)
            raise ArithmeticError("the critic of this test fails")
        return super().compute_values(rows)
