"""The reference policy: frozen weights that the actor should not drift too far from."""

from __future__ import annotations

from hpcflow.data.columns import Columns
from hpcflow.workers.model import Network
from hpcflow.workers.primitive import Rows, primitive


class Reference(Network):
    """Scores the actor's responses; never trained."""

    @primitive("3D_PROTO", reads=("prompt_ids", "response_ids"), writes=("ref_log_probs",))
    def compute_log_prob(self, rows: Rows) -> Columns:
        """Log-probs of the responses under the reference's weights."""
        return {"ref_log_probs": self.engine.log_probs(rows.columns)}
