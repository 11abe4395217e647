"""Rules of the check about an algorithm as a whole: its models, the columns that they hand each other, its
state."""

from __future__ import annotations

from hpcflow.config import Config
from hpcflow.dotted import columns_read, methods_called, models_called, signature, undecorated
from hpcflow.estimate import Facts
from hpcflow.schema import Problem, Problems, nearest

SAMPLED = ("response_ids", "rollout_log_probs", "old_log_probs", "truncated", "loss_mask")
WRITES: dict[str, dict[str, tuple[str, ...]]] = {
    "actor": {
        "load_prompts": ("prompt_ids", "record"),
        "generate_sequences": SAMPLED,
        "continue_sequences": SAMPLED,
        "generate_greedy": ("greedy_ids",),
        "compute_log_prob": ("old_log_probs",),
        "compute_advantages": ("advantages", "returns", "loss_mask", "kl", "cost_returns"),
        "compute_loss": ("pretrain_ids", "pretrain_loss"),
        "keep_groups": (),
        "take_groups": (),
        "update_actor": (),
    },
    "critic": {"compute_values": ("values",), "update_critic": ()},
    "cost_critic": {"compute_values": ("cost_values",), "update_critic": ()},
    "reference": {"compute_log_prob": ("ref_log_probs",)},
    "reward": {
        "compute_reward": ("reward", "reward_ok", "reward_error", "reward_attempts"),
        "compute_baseline": ("baseline", "baseline_ok"),
    },
    "cost": {"compute_cost": ("cost", "cost_ok", "cost_error", "cost_attempts")},
    "tool": {
        "observe": ("observation_ids", "observation_error"),
        "write_prompts": ("prompt_ids", "record"),
    },
}
"""Methods of each worker that a dataflow may call, and the columns that they can make; what one of them only
hands on is not among these."""
GROUPS = "hpcflow.algorithms.group_advantages:"


def _called(config: Config, facts: Facts) -> Problems:
    """Every model that the dataflow calls is among those of the algorithm, and has that method."""
    algorithm = config.algorithm
    function, models = algorithm.function, algorithm.models
    for name in models_called(function):
        if name not in models and name in config.models:
            works = f"algorithm.models=[{', '.join([*models, name])}]"
            yield Problem("algorithm.models", models, f"{function} calls {name}", works)
        elif name not in models:
            yield Problem(
                "algorithm.function",
                function,
                f"calls {name}, which is no model",
                f"m.{nearest(name, models)}",
            )
    for name, method in methods_called(function)[0]:
        known = WRITES.get(config.models[name].worker) if name in config.models else None
        if known is not None and method not in known:
            yield Problem(
                "algorithm.function",
                function,
                f"calls {name}.{method}, which a model of kind {config.models[name].worker} does not have",
                f"m.{name}.{nearest(method, known)}",
            )


def _columns(config: Config, facts: Facts) -> Problems:
    """What the advantage and the losses read is made by a method that the dataflow calls, as far as hpcflow
    knows the workers."""
    algorithm = config.algorithm
    workers = {name: config.models[name].worker for name in algorithm.models if name in config.models}
    if any(worker not in WRITES for worker in workers.values()):
        return
    called, complete = methods_called(algorithm.function)
    made = {"prompt_ids", "record"}
    for name, worker in workers.items():
        for method, columns in WRITES[worker].items():
            if (name, method) in called or not complete:
                made.update(columns)
    calls = {"advantage": algorithm.advantage, "policy_loss": algorithm.policy_loss, "state": algorithm.state}
    if not {"critic", "cost_critic"}.isdisjoint(workers.values()):
        calls["value_loss"] = algorithm.value_loss
    for key, call in calls.items():
        missing = (
            [column for column in (columns_read(call.function) or ()) if column not in made] if call else []
        )
        if missing:
            why, works = _maker(config, missing[0])
            yield Problem(
                f"algorithm.{key}.function", call.function, f"reads column {missing[0]}, which {why}", works
            )
        if call and undecorated(call.function):
            yield Problem(
                f"algorithm.{key}.function",
                call.function,
                "does not say which columns it reads",
                "@hpcflow.data.needs.reads('reward', 'loss_mask') above it, say",
            )


def _maker(config: Config, column: str) -> tuple[str, str]:
    """(why there is no such column, what to do)."""
    algorithm = config.algorithm
    makers = {
        worker: next(method for method, columns in methods.items() if column in columns)
        for worker, methods in WRITES.items()
        if any(column in columns for columns in methods.values())
    }
    known = [name for name, spec in config.models.items() if spec.worker in makers]
    there = next((name for name in known if name in algorithm.models), None)
    if there is not None:
        method = makers[config.models[there].worker]
        return (
            f"{there}.{method} makes, but {algorithm.function} does not call it",
            f"batch |= m.{there}.{method}(batch) before",
        )
    models = [*algorithm.models, (known or list(makers) or [column])[0]]
    return (
        f"none of the models {', '.join(algorithm.models)} makes",
        f"algorithm.models=[{', '.join(models)}], called by the dataflow",
    )


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
                f"${{models.{name}.limit}}}}, initial: {{multiplier: 1.0}}}}",
            )


def _state(config: Config, facts: Facts) -> Problems:
    """The advantage takes the numbers of the state."""
    state, advantage = config.algorithm.state, config.algorithm.advantage
    if state is None:
        return
    try:
        found = signature(advantage.function)
    except ValueError:
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
