"""AdamW on the local shards of sharded parameters.

The optimizer sees plain tensors (each rank's part), so a step is one fused pass without DTensor's dispatch on
every operation; its state is shown to checkpoints as DTensors with the placement of the parameters.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hpcflow.config import Optimizer


class ShardedAdamW:
    """One optimizer over ``parameters`` (name -> sharded DTensor); moments exist from the start, as
    float32 zeros."""

    def __init__(self, parameters: dict[str, DTensor], config: Optimizer) -> None:
        self.parameters, self.config = parameters, config
        with torch.no_grad():
            self._local = {name: p.to_local() for name, p in parameters.items()}
        self._adam = torch.optim.AdamW(
            list(self._local.values()),
            lr=config.lr,
            betas=tuple(config.betas),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for local in self._local.values():
            self._adam.state[local] = {
                "step": torch.zeros((), dtype=torch.float32, device=local.device),
                "exp_avg": torch.zeros_like(local),
                "exp_avg_sq": torch.zeros_like(local),
            }

    @property
    def steps(self) -> int:
        """Steps taken."""
        return int(next(iter(self._adam.state.values()))["step"])

    def lr(self) -> float:
        """Learning rate of the next step: linear warm-up over warmup_updates steps, then constant."""
        warmup = self.config.warmup_updates
        return self.config.lr * (min(1.0, (self.steps + 1) / warmup) if warmup else 1.0)

    def local_norm(self) -> float:
        """Euclidean norm of this rank's part of the gradients."""
        return float(torch.nn.utils.get_total_norm(self._take_gradients()))

    def step(self, norm: float) -> None:
        """One step; the gradients, whose global norm is ``norm``, are first scaled down to clip_norm."""
        scale = self.config.clip_norm / (norm + 1e-6)
        if scale < 1.0:
            torch._foreach_mul_(self._take_gradients(), scale)
        self._adam.param_groups[0]["lr"] = self.lr()
        self._adam.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self._adam.zero_grad(set_to_none=True)
        for parameter in self.parameters.values():
            parameter.grad = None

    def _take_gradients(self) -> list[torch.Tensor]:
        """Give the gradients that FSDP left on the DTensors to the plain tensors."""
        for name, parameter in self.parameters.items():
            self._local[name].grad = parameter.grad.to_local()
        return [local.grad for local in self._local.values()]

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """{"exp_avg": {name: DTensor}, "exp_avg_sq": {name: DTensor}}; writing into it changes the state."""
        return {
            moment: {
                name: DTensor.from_local(
                    self._adam.state[self._local[name]][moment],
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                for name, parameter in self.parameters.items()
            }
            for moment in ("exp_avg", "exp_avg_sq")
        }

    def set_steps(self, steps: int) -> None:
        for state in self._adam.state.values():
            state["step"].fill_(float(steps))

    def nbytes(self) -> int:
        """Bytes of this rank's moments."""
        return sum(2 * local.numel() * local.element_size() for local in self._local.values())


def global_sum(values: list[float], device: torch.device) -> list[float]:
    """Element by element over the pool."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()
