"""Rules of the check about an algorithm as a whole: its models, the columns that they hand each other, its
state."""

from __future__ import annotations

from hpcflow.config import Config
from hpcflow.dotted import columns_read, models_called, signature
from hpcflow.estimate import Facts
from hpcflow.schema import Problem, Problems

GENERATED = (
    *("prompt_ids", "record", "response_ids", "rollout_log_probs", "old_log_probs", "truncated", "loss_mask"),
    *("greedy_ids", "pretrain_ids", "pretrain_loss", "advantages", "returns", "kl", "cost_returns"),
)
WRITES = {
    "actor": GENERATED,
    "critic": ("values",),
    "cost_critic": ("cost_values",),
    "reference": ("ref_log_probs",),
    "reward": ("reward", "reward_ok", "reward_error", "baseline", "baseline_ok"),
    "cost": ("cost", "cost_ok", "cost_error"),
    "tool": ("observation_ids", "observation_error"),
}
"""Columns that a worker can make."""
GROUPS = "hpcflow.algorithms.group_advantages:"


def _called(config: Config, facts: Facts) -> Problems:
    """Every model that the dataflow calls is among those of the algorithm."""
    algorithm = config.algorithm
    for name in models_called(algorithm.function):
        if name not in algorithm.models:
            works = [*algorithm.models, name]
            yield Problem(
                "algorithm.models",
                algorithm.models,
                f"{algorithm.function} calls {name}",
                f"algorithm.models=[{', '.join(works)}]",
            )


def _columns(config: Config, facts: Facts) -> Problems:
    """What the advantage and the losses read is made by some model, as far as hpcflow knows the workers."""
    algorithm = config.algorithm
    workers = [config.models[name].worker for name in algorithm.models if name in config.models]
    if any(worker not in WRITES for worker in workers):
        return
    made = {column for worker in workers for column in WRITES[worker]}
    calls = {"advantage": algorithm.advantage, "policy_loss": algorithm.policy_loss, "state": algorithm.state}
    if any(
        config.models[name].worker in ("critic", "cost_critic")
        for name in algorithm.models
        if name in config.models
    ):
        calls["value_loss"] = algorithm.value_loss
    for key, call in calls.items():
        for column in (columns_read(call.function) or ()) if call else ():
            if column not in made:
                maker = next((worker for worker, writes in WRITES.items() if column in writes), None)
                known = [name for name, spec in config.models.items() if spec.worker == maker]
                yield Problem(
                    f"algorithm.{key}.function",
                    call.function,
                    f"reads column {column}, which none of the models {', '.join(algorithm.models)} makes",
                    f"algorithm.models=[{', '.join([*algorithm.models, (known or [maker or column])[0]])}], "
                    f"called by the dataflow",
                )
                break


def _groups(config: Config, facts: Facts) -> Problems:
    """Draws of a prompt are compared with each other where an estimator needs it."""
    algorithm, draws = config.algorithm, config.algorithm.batch.draws
    compares = (
        algorithm.advantage.function.startswith(GROUPS) or algorithm.advantage.args.get("baseline") is True
    )
    if compares and draws < 2:
        yield Problem(
            "algorithm.batch.draws",
            draws,
            "a group of one has no advantage: all would be 0",
            "algorithm.batch.draws=4",
        )


def _cost(config: Config, facts: Facts) -> Problems:
    """A cost has a limit, and something that holds the policy to it."""
    for name in config.algorithm.models:
        spec = config.models.get(name)
        if spec is None or spec.worker != "cost":
            continue
        if spec.limit is None:
            yield Problem(
                f"models.{name}.limit",
                None,
                "a cost needs the limit that its mean is kept below",
                f"models.{name}.limit=0.1",
            )
        if config.algorithm.state is None:
            yield Problem(
                "algorithm.state",
                None,
                f"nothing holds the policy to the limit of {name}",
                "algorithm.state={function: 'hpcflow.algorithms.lagrange:multiplier', args: {limit: "
                "${models.%s.limit}}, initial: {multiplier: 1.0}}" % name,
            )


def _state(config: Config, facts: Facts) -> Problems:
    """The advantage takes the numbers of the state."""
    state, advantage = config.algorithm.state, config.algorithm.advantage
    if state is None:
        return
    try:
        found = signature(advantage.function)
    except (ValueError, ImportError, SyntaxError):
        return  # reported with the other functions
    for name in state.initial:
        if found is not None and name not in found.accepted and not found.any_keyword:
            yield Problem(
                f"algorithm.state.initial.{name}",
                state.initial[name],
                f"{advantage.function} takes no such argument",
                f"~algorithm.state.initial.{name}, or "
                "advantage.function=hpcflow.algorithms.advantages:safe_gae",
            )


def _pretrain(config: Config, facts: Facts) -> Problems:
    """Pretraining texts are there where the dataflow asks for their loss."""
    algorithm = config.algorithm
    if algorithm.pretrain is not None and config.data.pretrain is None:
        yield Problem(
            "data.pretrain",
            None,
            "algorithm.pretrain needs texts",
            "data.pretrain=configs/prompts/everyday_sentences.jsonl",
        )


def _overlong(config: Config, facts: Facts) -> Problems:
    args = config.algorithm.advantage.args
    buffer, most = args.get("overlong_buffer", 0), args.get("max_tokens")
    if isinstance(buffer, int) and isinstance(most, int) and not 0 <= buffer <= most:
        key = "algorithm.advantage.args.overlong_buffer"
        yield Problem(key, buffer, f"must be between 0 and max_tokens={most}", f"{key}={max(0, most // 4)}")


RULES = (_called, _columns, _groups, _cost, _state, _pretrain, _overlong)
