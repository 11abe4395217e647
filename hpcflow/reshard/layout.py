"""Parallel layouts: where a rank stands in training and in generation.

Training order: tensor parallel fastest, then pipeline, then data: r = dp*p*t + pp*t + tp. Generation splits each
training replica of p*t ranks into d_g = p*t/(p_g*t_g) generation replicas by striding (HybridFlow, section 5.2), so the
weights that a rank needs for generation always contain its own training shard. A model trained without tensor or
pipeline parallelism (FSDP, ZeRO) has p = t = 1; its generation replicas are runs of p_g*t_g consecutive ranks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Training sizes ``p``, ``t``, ``d`` and generation sizes ``p_g``, ``t_g``. ValueError when they do not fit."""

    d: int
    p: int = 1
    t: int = 1
    p_g: int = 1
    t_g: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"layout {name}={value}: must be at least 1")
        if self.p * self.t == 1:
            if self.d % (self.p_g * self.t_g):
                raise ValueError(
                    f"p_g*t_g={self.p_g * self.t_g} does not divide the {self.d} ranks; use e.g. t_g=1"
                )
        elif self.t % self.t_g or self.p % self.p_g:
            raise ValueError(
                f"generation t_g={self.t_g}, p_g={self.p_g} must divide training t={self.t}, p={self.p}; use e.g. "
                f"t_g={self.t}, p_g={self.p}"
            )

    @property
    def ranks(self) -> int:
        return self.p * self.t * self.d

    @property
    def generation_replicas(self) -> int:
        return self.ranks // (self.p_g * self.t_g)

    def training(self, rank: int) -> tuple[int, int, int]:
        """(pipeline, tensor, data) coordinates of a rank."""
        return rank // self.t % self.p, rank % self.t, rank // (self.p * self.t)

    def generation(self, rank: int) -> tuple[int, int, int]:
        """(pipeline stage, tensor place, replica) of a rank in generation; replicas in data order."""
        if self.p * self.t == 1:
            place = rank % (self.p_g * self.t_g)
            return place // self.t_g, place % self.t_g, rank // (self.p_g * self.t_g)
        pp, tp, dp = self.training(rank)
        r_p, r_t = self.p // self.p_g, self.t // self.t_g
        replica = dp * r_p * r_t + (pp % r_p) * r_t + tp % r_t
        return pp // r_p, tp // r_t, replica
