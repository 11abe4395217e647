"""The critic: a network of its own that predicts, at every response token, the return from there."""

from __future__ import annotations

from hpcflow.config import Config
from hpcflow.data.columns import Columns
from hpcflow.data.needs import needs_of
from hpcflow.workers.model import Network, with_loss
from hpcflow.workers.primitive import Primitive, Rows, primitive


class Critic(Network):
    """A value head on a language model; the head starts at zero."""

    head = "value"

    @classmethod
    def configured(cls, found: dict[str, Primitive], config: Config) -> dict[str, Primitive]:
        if config.algorithm.value_loss is None:
            raise ValueError(
                f"algorithm.value_loss is null, but algorithm {config.algorithm.name} calls a critic; it needs e.g. "
                "value_loss.function=hpcflow.algorithms.losses:clipped_value"
            )
        return with_loss(found, "update_critic", config.algorithm.value_loss, needs_of)

    @primitive("3D_PROTO", reads=("prompt_ids", "response_ids"), writes=("values",))
    def compute_values(self, rows: Rows) -> Columns:
        """Value of the state before each response token."""
        return {"values": self.engine.values(rows.columns)}

    @primitive("3D_PROTO", reads=("prompt_ids", "response_ids", "loss_mask"), kind="advancing")
    def update_critic(self, rows: Rows) -> dict[str, float]:
        """One update by the configured value loss; the weight version is one higher afterwards."""
        return self.update(rows, self.config.algorithm.value_loss)
