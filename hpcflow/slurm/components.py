"""Which ranks of the world run on which nodes: the components of a heterogeneous job.

Component 0 is the head: controller and recorder, no GPU. The workers follow in the order of
``cluster.components``; pools are laid over their ranks by the placement, so another placement of as many
ranks runs in the same allocation.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hpcflow.config import FIRST_WORKER, Cluster, Component, Config
from hpcflow.schema import Problem, Problems

HEAD = "head"


@dataclass(frozen=True)
class Block:
    """A component with its share of the world: ``ranks`` consecutive world ranks on ``nodes`` nodes."""

    name: str
    ranks: range
    component: Component

    @property
    def nodes(self) -> int:
        return -(-len(self.ranks) // self.component.ranks_per_node)

    @property
    def tasks_per_node(self) -> int:
        """At most so many ranks share a node."""
        return min(len(self.ranks), self.component.ranks_per_node)

    @property
    def gpus_per_node(self) -> int:
        return self.tasks_per_node * self.component.gpus

    @property
    def memory_gib(self) -> int:
        """Of a node; 0 = all it has."""
        return self.tasks_per_node * self.component.memory_gib


def blocks(config: Config) -> list[Block]:
    """Head and workers in rank order. ValueError where components and placement do not fit each other."""
    problems = list(component_problems(config))
    if problems:
        raise ValueError("\n".join(map(str, problems)))
    cluster, workers = config.cluster, config.world_size - FIRST_WORKER
    if not cluster.slurm.heterogeneous:
        return [Block("all", range(config.world_size), _components(cluster).popitem()[1])]
    head = dataclasses.replace(cluster.slurm.head, ranks=FIRST_WORKER, ranks_per_node=FIRST_WORKER, gpus=0)
    found, start = [Block(HEAD, range(FIRST_WORKER), head)], FIRST_WORKER
    fixed = sum(component.ranks or 0 for component in _components(cluster).values())
    for name, component in _components(cluster).items():
        stop = start + (component.ranks or workers - fixed)
        found.append(Block(name, range(start, stop), component))
        start = stop
    return found


def component_problems(config: Config) -> Problems:
    """Breaches of ``cluster.components``: every worker rank has a place, every component has a rank."""
    components, workers = _components(config.cluster), config.world_size - FIRST_WORKER
    key, open_ones = "cluster.components", [name for name, c in components.items() if c.ranks is None]
    if HEAD in components:
        yield Problem(f"{key}.{HEAD}", HEAD, "is the name of component 0", "another name")
    if not config.cluster.slurm.heterogeneous:
        if len(components) > 1:
            yield Problem(
                key,
                list(components),
                "slurm.heterogeneous=false makes one component",
                f"{key}={{workers: {{ranks_per_node: ...}}}}, or cluster.slurm.heterogeneous=true",
            )
        return
    fixed = sum(component.ranks or 0 for component in components.values())
    if len(open_ones) > 1:
        yield Problem(
            f"{key}.{open_ones[1]}.ranks",
            None,
            f"{open_ones[0]} takes all ranks that are left already",
            f"{key}.{open_ones[1]}.ranks=1",
        )
    elif open_ones and fixed >= workers:
        yield Problem(
            f"{key}.{open_ones[0]}.ranks",
            None,
            f"would be a component without tasks: placement {config.placement.name} has {workers} "
            f"worker ranks, the other components hold {fixed}",
            f"~{key}.{open_ones[0]}, or a placement of more ranks",
        )
    elif not open_ones and fixed != workers:
        last = list(components)[-1]
        yield Problem(
            f"{key}.{last}.ranks",
            components[last].ranks,
            f"the components hold {fixed} ranks, placement {config.placement.name} has {workers}: "
            "it was made for another cluster",
            f"{key}.{last}.ranks=null, which takes all that are left",
        )


def _components(cluster: Cluster) -> dict[str, Component]:
    """A copy of ``cluster.components``; one by default."""
    return dict(cluster.components) or {"workers": Component()}
