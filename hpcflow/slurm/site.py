"""What the cluster has, against what a job asks for: named before submission, with a value that works."""

from __future__ import annotations

from dataclasses import dataclass

from hpcflow.config import Config
from hpcflow.estimate import Facts, model_facts, rank_memory, round_up
from hpcflow.schema import Problem, Problems, nearest
from hpcflow.slurm import client
from hpcflow.slurm.components import HEAD, Block, blocks, component_problems


@dataclass
class Partition:
    """The nodes of a partition: how many, and the most that one of them has."""

    default: bool = False
    nodes: int = 0
    cpus: int = 0
    memory_gib: float = 0.0
    gpus: int = 0
    gpu_nodes: int = 0


def partitions() -> dict[str, Partition]:
    """By name, as sinfo says. `hpcflow.slurm.client.SlurmError` when it does not answer."""
    found: dict[str, Partition] = {}
    for line in client.run("sinfo", "-h", "-e", "-o", "%P|%D|%c|%m|%G").splitlines():
        name, nodes, cpus, memory, resources = line.split("|")
        partition = found.setdefault(name.rstrip("*"), Partition())
        partition.default |= name.endswith("*")
        partition.nodes += int(nodes)
        partition.cpus = max(partition.cpus, int(cpus.rstrip("+")))
        partition.memory_gib = max(partition.memory_gib, int(memory.rstrip("+")) / 1024)
        gpus = gpus_in(resources)
        partition.gpus = max(partition.gpus, gpus)
        partition.gpu_nodes += int(nodes) if gpus else 0
    return found


def gpus_in(resources: str) -> int:
    """GPUs in a gres text as sinfo prints it: ``gpu:a100:4(S:0-1),gpu:2`` = 6."""
    parts = [part.partition("(")[0].split(":") for part in resources.split(",")]
    return sum(int(words[-1]) for words in parts if words[0] == "gpu" and words[-1].isdigit())


def problems(config: Config) -> list[Problem]:
    """All breaches of a job on this cluster. `hpcflow.slurm.client.SlurmError` when Slurm does not answer."""
    found = list(component_problems(config))
    if found:
        return found
    have = partitions()
    for block in blocks(config):
        found += _block_problems(config, block, have)
    if not found:
        found += _node_problems(config, have)
    return found + list(memory_problems(config))


def _partition(config: Config, block: Block, have: dict[str, Partition]) -> str | None:
    """The name of the block's partition; None where it names none and the cluster has no default."""
    default = next((name for name, partition in have.items() if partition.default), None)
    return block.component.partition or config.cluster.slurm.partition or default


def _node_problems(config: Config, have: dict[str, Partition]) -> Problems:
    """Components of one job share no node: a job that needs more than there are would wait for ever."""
    asked: dict[str | None, list[Block]] = {}
    for block in blocks(config):
        asked.setdefault(_partition(config, block, have), []).append(block)
    for name, parts in asked.items():
        nodes, has = [block.nodes for block in parts], have[name].nodes
        if sum(nodes) > has:
            total = f"{' + '.join(map(str, nodes))} = {sum(nodes)} nodes"
            yield Problem(
                "placement.name",
                config.placement.name,
                f"its components share no node and take {total}; {name} has {has}",
                "more ranks_per_node in cluster.components, or a placement of fewer ranks",
            )


def _block_problems(config: Config, block: Block, have: dict[str, Partition]) -> Problems:
    key = "cluster.slurm.head" if block.name == HEAD else f"cluster.components.{block.name}"
    own, name = block.component.partition, _partition(config, block, have)
    if name is None:
        yield Problem("cluster.slurm.partition", None, "there is no default one", f"one of {', '.join(have)}")
        return
    if name not in have:
        where = f"{key}.partition" if own else "cluster.slurm.partition"
        yield Problem(where, name, "the cluster has no such partition", f"{where}={nearest(name, have)}")
        return
    partition, component = have[name], block.component
    if block.gpus_per_node > partition.gpus:
        works = partition.gpus // max(1, component.gpus)
        yield Problem(
            f"{key}.ranks_per_node",
            component.ranks_per_node,
            f"of {component.gpus} GPU each are {block.gpus_per_node} GPUs a node; "
            f"a node of {name} has {partition.gpus}",
            f"{key}.ranks_per_node={works}" if works else f"{key}.gpus=0, or a partition with GPUs",
        )
    nodes = partition.gpu_nodes if component.gpus else partition.nodes
    if block.nodes > nodes:
        asked = f"{len(block.ranks)} ranks at {component.ranks_per_node} a node are {block.nodes} nodes"
        gpus = f", {nodes * partition.gpus} GPUs in all" if component.gpus else ""
        yield Problem(
            f"{key}.ranks",
            len(block.ranks),
            f"{asked}; {name} has {nodes}{gpus}",
            "a placement of fewer ranks",
        )
    cpus = block.tasks_per_node * component.cpus
    if cpus > partition.cpus:
        works = max(1, partition.cpus // block.tasks_per_node)
        yield Problem(
            f"{key}.cpus",
            component.cpus,
            f"{cpus} on a node; {name} has {partition.cpus}",
            f"{key}.cpus={works}",
        )
    if block.memory_gib > partition.memory_gib:
        yield Problem(
            f"{key}.memory_gib",
            component.memory_gib,
            f"{block.memory_gib} GiB on a node; {name} has {partition.memory_gib:.0f}",
            f"{key}.memory_gib={int(partition.memory_gib) // block.tasks_per_node}",
        )


def memory_problems(config: Config) -> Problems:
    """Every rank fits into its GPU, or into the memory that its component gives it."""
    facts: Facts = {}
    for name in config.algorithm.models:
        if name in config.models and config.models[name].path is not None:
            facts[name] = model_facts(config.models[name].path)
    for pool, ranks in config.placement.ranks().items():
        for block in blocks(config):
            if not set(ranks) & set(block.ranks):
                continue
            component = block.component
            needed = rank_memory(config, facts, gpu=component.gpus > 0)[pool]
            gib = sum(needed.values())
            limit = config.cluster.gpu_memory_gib * component.gpus or component.memory_gib
            if limit and gib > limit:
                biggest = sorted(needed.items(), key=lambda part: -part[1])[:4]
                parts = ", ".join(f"{what} {part:.1f}" for what, part in biggest)
                key = (
                    "cluster.gpu_memory_gib"
                    if component.gpus
                    else f"cluster.components.{block.name}.memory_gib"
                )
                works = "more ranks, larger tensor_parallel, smaller micro_batch or kv_cache_gib"
                yield Problem(
                    key,
                    f"{limit:g}",
                    f"a rank of pool {pool} on {block.name} needs about {gib:.1f} GiB: {parts}",
                    works if component.gpus else f"{key}={round_up(gib):g}",
                )
