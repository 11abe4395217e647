"""A neural reward model: a Hugging Face sequence classifier with one label, sharded like every other
model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hpcflow.data.columns import Columns
from hpcflow.engines.fsdp import FSDPEngine

if TYPE_CHECKING:
    from hpcflow.config import TrainingProtocol


class ScoreModel:
    """Scores prompt + response by the model in ``path``, whose vocabulary must be that of the tokens it is
    given.

    Collective over the pool. ValueError when the folder is no classifier with one label and a linear head.
    """

    def __init__(self, path: str, *, protocol: TrainingProtocol, trust_remote_code: bool = False) -> None:
        self._engine = FSDPEngine(
            path, head="score", trainable=False, protocol=protocol, trust_remote_code=trust_remote_code
        )

    def scores(self, rows: Columns) -> torch.Tensor:
        """float32 [rows]: the score at the last token of each row (prompt_ids, response_ids: ragged
        int64)."""
        return self._engine.scores(rows)
