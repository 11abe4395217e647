"""Rules of the check about where a run goes: pools, the ranks of an engine, memory, the run folder."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hpcflow.check_models import actors
from hpcflow.config import Config
from hpcflow.estimate import GIB, Facts, ModelFacts, rank_memory, round_up, total_memory
from hpcflow.schema import Problem, Problems, nearest


def machine_memory_gib() -> float:
    """Memory of this machine, or of the cgroup that this process is confined to, whichever is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).exists() else ""
        if text.isdigit():
            limits.append(int(text))
    return min(limits) / GIB


def _placement(config: Config, facts: Facts) -> Problems:
    """Every model that the algorithm calls is in exactly one pool; nothing else is."""
    pools = config.placement.pools
    homes: dict[str, list[str]] = {}
    for pool_name, pool in pools.items():
        key = f"placement.pools.{pool_name}.models"
        if not pool.models:
            yield Problem(key, [], "its ranks would have nothing to do", f"~placement.pools.{pool_name}")
        for model in pool.models:
            homes.setdefault(model, []).append(pool_name)
            if model not in config.models:
                yield Problem(
                    key,
                    model,
                    "is placed but no such model is defined",
                    nearest(model, config.algorithm.models),
                )
    for model in config.algorithm.models:
        where = homes.get(model, [])
        if len(where) != 1 and model in config.models:
            seen = f"{model} in {', '.join(where)}" if where else f"{model} nowhere"
            pool_name = where[0] if where else next(iter(pools), "all")
            placed = [m for m in pools[pool_name].models if m in config.models] if pool_name in pools else []
            works = list(dict.fromkeys(placed + [model]))
            yield Problem(
                "placement.pools",
                seen,
                f"{config.algorithm.name} calls it: it must be in exactly one pool",
                f"placement.pools.{pool_name}.models=[{', '.join(works)}]"
                + (" and nowhere else" if len(where) > 1 else ""),
            )


def _tensor_parallel(config: Config, facts: Facts) -> Problems:
    """Generation groups fill the actor's pool and split its attention heads."""
    size = config.protocol.generation.tensor_parallel
    if size > 1 and config.protocol.generation.engine == "plain":
        key = "protocol.generation.tensor_parallel"
        yield Problem(key, size, "the plain engine does not split a model", f"{key}=1, or engine=vllm")
        return
    for name in actors(config):
        for pool in config.placement.pools.values():
            if name not in pool.models or name not in facts:
                continue
            model = facts[name]
            works = [t for t in range(1, pool.ranks + 1) if pool.ranks % t == 0 and _splits_heads(model, t)]
            if size not in works:
                yield Problem(
                    "protocol.generation.tensor_parallel",
                    size,
                    f"must divide the {pool.ranks} ranks of {name}'s pool and its {model.heads} heads "
                    f"({model.kv_heads} of keys and values)",
                    f"protocol.generation.tensor_parallel={' or '.join(map(str, works))}",
                )


def _splits_heads(model: ModelFacts, size: int) -> bool:
    kv = model.kv_heads
    return model.heads % size == 0 and (kv % size == 0 or size % kv == 0)


def _run_folder(config: Config, facts: Facts) -> Problems:
    """Run directories can be made, and the disk holds the checkpoints that are kept and one more."""
    folder = Path(config.run.dir).expanduser().absolute()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Problem(
            "run.dir",
            config.run.dir,
            f"{existing} is not a folder that can be written to",
            f"run.dir={Path.home() / 'runs'}",
        )
        return
    trained = sum(model.params for name, model in facts.items() if config.models[name].optimizer is not None)
    one = 12 * trained / GIB  # weights and two moments in float32
    needed, fewest = (config.run.keep + 1) * one, 2 * one
    free = shutil.disk_usage(existing).free / GIB
    if needed > free:
        elsewhere = f"run.dir=<a file system with {math.ceil(needed)} GiB>"
        yield Problem(
            "run.dir",
            config.run.dir,
            f"has {free:.1f} GiB free, {config.run.keep} + 1 checkpoints take {needed:.1f}",
            f"run.keep=1, or {elsewhere}" if config.run.keep > 1 and fewest <= free else elsewhere,
        )


def memory_problems(config: Config, facts: Facts, nodes: int) -> Problems:
    """All ranks of a node fit into its memory. Only asked when every model is known and placed."""
    placed = [name for pool in config.placement.pools.values() for name in pool.models]
    if any(name not in config.models for name in placed) or any(
        config.models[name].path is not None and name not in facts for name in placed
    ):
        return
    available = config.cluster.memory_gib or machine_memory_gib()
    needed = total_memory(config, facts) / nodes
    if needed <= available:
        return
    pool, parts = max(rank_memory(config, facts).items(), key=lambda entry: sum(entry[1].values()))
    biggest = ", ".join(f"{what} {gib:.1f}" for what, gib in sorted(parts.items(), key=lambda p: -p[1])[:4])
    works = next(
        (words for words, smaller in _smaller(config) if total_memory(smaller, facts) / nodes <= available),
        f"nodes of {round_up(needed):g} GiB",
    )
    yield Problem(
        "cluster.memory_gib",
        round(available, 1),
        f"the ranks of a node need about {needed:.1f} GiB; a rank of pool {pool}: {biggest}",
        works,
    )


def _smaller(config: Config) -> Iterator[tuple[str, Config]]:
    """Configs of the same training in less memory, the cheapest change first; each includes those before."""
    words: list[str] = []
    for section, key, values in (
        ("generation", "kv_cache_gib", (1.0, 0.25)),
        ("training", "micro_batch", (4, 1)),
    ):
        for value in values:
            protocol = config.protocol
            part = getattr(protocol, section)
            if getattr(part, key) <= value:
                continue
            protocol = dataclasses.replace(protocol, **{section: dataclasses.replace(part, **{key: value})})
            config = dataclasses.replace(config, protocol=protocol)
            words = [w for w in words if f".{key}=" not in w] + [f"protocol.{section}.{key}={value}"]
            yield " ".join(words), config


RULES = (_placement, _tensor_parallel, _run_folder)
