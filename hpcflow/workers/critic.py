"""The critic: a network of its own that predicts, at every response token, the return from there."""

from __future__ import annotations

import dataclasses

from hpcflow.config import Config
from hpcflow.data.columns import Columns
from hpcflow.data.needs import needs_of
from hpcflow.workers.model import Network, with_loss
from hpcflow.workers.primitive import Primitive, Rows, primitive


class Critic(Network):
    """A value head on a language model; the head starts at zero. ``values``, ``returns``: the columns it
    makes and learns."""

    head = "value"
    values, returns = "values", "returns"

    @classmethod
    def configured(cls, found: dict[str, Primitive], config: Config) -> dict[str, Primitive]:
        if config.algorithm.value_loss is None:
            raise ValueError(
                f"algorithm.value_loss is null, but algorithm {config.algorithm.name} calls a critic; it "
                "needs e.g. value_loss.function=hpcflow.algorithms.losses:clipped_value"
            )
        found = with_loss(found, "update_critic", config.algorithm.value_loss, needs_of)
        own = {"values": cls.values, "returns": cls.returns}
        for name in ("compute_values", "update_critic"):
            p = found[name]
            renamed = {
                key: tuple(own.get(c, c) for c in getattr(p, key)) for key in ("reads", "optional", "writes")
            }
            found[name] = dataclasses.replace(p, **renamed)
        return found

    @primitive("3D_PROTO", reads=("prompt_ids", "response_ids"), writes=("values",))
    def compute_values(self, rows: Rows) -> Columns:
        """Value of the state before each response token."""
        return {self.values: self.engine.values(rows.columns)}

    @primitive("3D_PROTO", reads=("prompt_ids", "response_ids", "loss_mask"), kind="advancing")
    def update_critic(self, rows: Rows) -> dict[str, float]:
        """One update by the configured value loss; the weight version is one higher afterwards."""
        usual = {self.values: "values", self.returns: "returns"}
        columns = {usual.get(name, name): column for name, column in rows.columns.items()}
        return self.update(dataclasses.replace(rows, columns=columns), self.config.algorithm.value_loss)


class CostCritic(Critic):
    """The critic of costs, beside that of rewards."""

    values, returns = "cost_values", "cost_returns"
