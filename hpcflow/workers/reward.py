"""Rewards and costs: a verifier function in a pool of processes, or a neural reward model; one node for
both."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from hpcflow.config import Config
from hpcflow.data.columns import Column, Columns, text_column, texts
from hpcflow.data.models import resolve_model
from hpcflow.data.rewards import VerifierPool
from hpcflow.data.tokenizers import load_tokenizer
from hpcflow.engines.score_model import ScoreModel
from hpcflow.workers.host import join_pool
from hpcflow.workers.model import Model
from hpcflow.workers.primitive import Context, Output, Rows, primitive


class Scorer(Model):
    """One float32 per response. A sample whose number cannot be computed is marked with its error, never
    given 0 silently; RuntimeError when their share exceeds ``max_error_rate``."""

    def __init__(self, context: Context, *, config: Config, unique: str) -> None:
        super().__init__(context, config=config, unique=unique)
        spec = self.spec
        self.verifiers: VerifierPool | None = None
        self.network: ScoreModel | None = None
        if spec.function:
            self.tokenizer = load_tokenizer(policy_path(config), config.trust_remote_code)
            self.verifiers = VerifierPool(
                spec.function,
                processes=spec.processes,
                timeout_s=spec.timeout_s,
                retries=spec.retries,
                args=spec.args,
            )
        else:
            join_pool(context)
            self.network = ScoreModel(
                resolve_model(spec.path),
                protocol=config.protocol.training,
                trust_remote_code=config.trust_remote_code,
            )

    def score(
        self, rows: Rows, responses: Column
    ) -> tuple[torch.Tensor, torch.Tensor, list[str], torch.Tensor]:
        """(score float32 [rows], ok bool [rows], errors, attempts int32 [rows]) of ``responses`` to the rows'
        prompts; score 0 where not ok."""
        if self.verifiers:
            samples = as_samples(self.tokenizer, rows["record"], responses)
            found, ok, errors, attempts = self.verifiers.score(samples)
        else:
            found = self.network.scores({"prompt_ids": rows["prompt_ids"], "response_ids": responses})
            ok = torch.isfinite(found)
            errors = [
                "" if good else f"the model gave {x}" for good, x in zip(ok, found.tolist(), strict=True)
            ]
            found = torch.where(ok, found, 0.0)
            attempts = torch.ones(len(ok), dtype=torch.int32)
        check_rate(self, ok, errors)
        return found, ok, errors, attempts

    def close(self) -> None:
        if self.verifiers:
            self.verifiers.close()


class Reward(Scorer):
    """What the policy shall raise."""

    @primitive(
        "DP_PROTO",
        reads=("prompt_ids", "response_ids", "record"),
        writes=("reward", "reward_ok", "reward_error", "reward_attempts"),
        kind="replayable",
    )
    def compute_reward(self, rows: Rows) -> Columns:
        """Reward of each response; where ``reward_ok`` is false it is 0 and ``reward_error`` says why.
        ``reward_attempts`` (int32): how often it was asked for."""
        reward, ok, errors, attempts = self.score(rows, rows["response_ids"])
        said = text_column(errors)
        return {"reward": reward, "reward_ok": ok, "reward_error": said, "reward_attempts": attempts}

    @primitive(
        "DP_PROTO",
        reads=("prompt_ids", "greedy_ids", "record"),
        writes=("baseline", "baseline_ok"),
        kind="replayable",
    )
    def compute_baseline(self, rows: Rows) -> Columns:
        """Reward of each greedy response, for an advantage that is relative to it."""
        baseline, ok, *_ = self.score(rows, rows["greedy_ids"])
        return {"baseline": baseline, "baseline_ok": ok}


class Cost(Scorer):
    """What the policy shall keep below ``limit`` on average: a reward model or function, read the other
    way."""

    @primitive(
        "DP_PROTO",
        reads=("prompt_ids", "response_ids", "record"),
        writes=("cost", "cost_ok", "cost_error", "cost_attempts"),
        kind="replayable",
    )
    def compute_cost(self, rows: Rows) -> Output:
        """Cost of each response; where ``cost_ok`` is false it is 0 and ``cost_error`` says why.
        ``cost_attempts`` (int32): how often it was asked for."""
        cost, ok, errors, attempts = self.score(rows, rows["response_ids"])
        said = text_column(errors)
        columns: Columns = {"cost": cost, "cost_ok": ok, "cost_error": said, "cost_attempts": attempts}
        return Output(columns, value={"mean": self.mean(cost[ok])})


def as_samples(tokenizer: Any, records: Column, responses: Column) -> list[dict[str, Any]]:
    """What a verifier function is called with, one dict a row."""
    decoded = tokenizer.batch_decode(responses.tolist(), skip_special_tokens=True)
    return [
        {"prompt": _question(record), "response": response, "record": record}
        for record, response in zip(map(json.loads, texts(records)), decoded, strict=True)
    ]


def check_rate(model: Model, ok: torch.Tensor, errors: list[str]) -> None:
    """RuntimeError on all ranks of the group when too large a part of its calls failed."""
    first = next((error for error in errors if error), "")
    mine = json.dumps([int((~ok).sum()), len(ok), first]).encode()
    said = [json.loads(each) for each in model.context.exchange(mine)]
    failed, total = sum(each[0] for each in said), sum(each[1] for each in said)
    limit, name = model.spec.max_error_rate, model.context.group
    if failed > math.floor(limit * total):
        example = next(each[2] for each in said if each[2])
        raise RuntimeError(
            f"{failed} of {total} {name}s failed, above models.{name}.max_error_rate={limit:g}; "
            f"the first: {example}"
        )


def policy_path(config: Config) -> str:
    """The model whose tokens are read: the first that has weights."""
    return next(config.models[name].path for name in config.algorithm.models if config.models[name].path)


def _question(record: dict[str, Any]) -> str:
    """The prompt's text: the record's own, or the last message."""
    prompt = record.get("messages", record.get("prompt", ""))
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
