"""From a config to a world: which rank is in which pool, which class each model is, how it is laid out."""

from __future__ import annotations

from typing import Any

from hpcflow.config import Config
from hpcflow.data.resolve import resolve
from hpcflow.dataflow.world import Member
from hpcflow.reshard.layout import Layout
from hpcflow.workers.primitive import primitives_of

WORKERS = {
    "actor": "hpcflow.workers.actor:Actor",
    "critic": "hpcflow.workers.critic:Critic",
    "cost_critic": "hpcflow.workers.critic:CostCritic",
    "reference": "hpcflow.workers.reference:Reference",
    "reward": "hpcflow.workers.reward:Reward",
    "cost": "hpcflow.workers.reward:Cost",
    "tool": "hpcflow.workers.tool:Tool",
}
RECORDER, RECORDER_RANK = "recorder", 1
GENERATES = "generate_sequences"


def assemble(config: Config, run: str, unique: str) -> tuple[dict[str, tuple[int, ...]], dict[str, Member]]:
    """(pools, members) of a run. ``unique`` differs between launches; it names shared memory."""
    pools: dict[str, tuple[int, ...]] = {RECORDER: (RECORDER_RANK,)}
    recorder = "hpcflow.workers.recorder:Recorder"
    members = {
        RECORDER: Member(recorder, RECORDER, Layout(d=1), primitives_of(resolve(recorder)), {"run": run}),
    }
    for pool, ranks in config.placement.ranks().items():
        pools[pool] = tuple(ranks)
        for name in config.placement.pools[pool].models:
            members[name] = _member(config, name, pool, len(ranks), f"{unique}-{pool}")
    return pools, members


def _member(config: Config, name: str, pool: str, ranks: int, unique: str) -> Member:
    worker = config.models[name].worker
    path = WORKERS.get(worker, worker)
    cls: Any = resolve(path)
    primitives = cls.configured(primitives_of(cls), config)
    generates = GENERATES in primitives
    layout = Layout(d=ranks, t_g=config.protocol.generation.tensor_parallel if generates else 1)
    return Member(path, pool, layout, primitives, {"config": config, "unique": unique})
