"""FSDP2's units of a model: what is split over the ranks together, and gathered together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hpcflow.engines import gloo_comm

if TYPE_CHECKING:
    from hpcflow.config import TrainingProtocol
    from hpcflow.engines.token_model import TokenModel


def shard(model: TokenModel, protocol: TrainingProtocol, ranks: int, device: torch.device) -> None:
    """Split the parameters over the ranks, one unit per layer, then give memory (without values) to those on
    the meta device.

    Weights are gathered in ``protocol.dtype``, those of a value head in float32; gradients are summed, not
    averaged, in float32.
    """
    mesh = init_device_mesh(device.type, (ranks,))
    release = protocol.reshard_after_forward
    dtype = getattr(torch, protocol.dtype)
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for layer in model.layers():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=release)
    if model.head == "value":
        exact = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
        fully_shard(model.value_head, mesh=mesh, mp_policy=exact, reshard_after_forward=release)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=release)
    for module in units(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if device.type == "cpu":
            module.set_custom_all_gather(gloo_comm.BroadcastAllGather())
            module.set_custom_reduce_scatter(gloo_comm.PairwiseReduceScatter())
    # Not to_empty(), which would empty the buffers too.
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


def units(model: torch.nn.Module) -> list[FSDPModule]:
    """All units of the model, outer ones first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def owners(model: torch.nn.Module, names: list[str]) -> list[tuple[FSDPModule, list[str]]]:
    """Each unit with the names of the parameters that are gathered with it."""
    named = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    owned: dict[str, list[str]] = {name: [] for name in named}
    for name in names:
        inside = [unit for unit in named if not unit or name.startswith(unit + ".")]
        owned[max(inside, key=len)].append(name)
    return [(named[unit], inside) for unit, inside in owned.items()]
