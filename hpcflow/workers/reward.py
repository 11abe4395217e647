"""The reward: a verifier function in a pool of processes, or a neural reward model; one node for both."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from hpcflow.config import Config
from hpcflow.data.columns import Columns, text_column, texts
from hpcflow.data.models import resolve_model
from hpcflow.data.rewards import VerifierPool
from hpcflow.data.tokenizers import load_tokenizer
from hpcflow.engines.score_model import ScoreModel
from hpcflow.workers.host import join_pool
from hpcflow.workers.model import Model
from hpcflow.workers.primitive import Context, Rows, primitive


class Reward(Model):
    """One float32 per response. A sample whose reward cannot be computed is marked with its error, never given 0
    silently; RuntimeError when their share exceeds ``max_error_rate``."""

    def __init__(self, context: Context, *, config: Config, unique: str) -> None:
        super().__init__(context, config=config, unique=unique)
        spec = self.spec
        self.verifiers: VerifierPool | None = None
        self.network: ScoreModel | None = None
        if spec.function:
            self.tokenizer = load_tokenizer(_policy_path(config), config.trust_remote_code)
            self.verifiers = VerifierPool(
                spec.function, processes=spec.processes, timeout_s=spec.timeout_s, args=spec.args
            )
        else:
            join_pool(context)
            self.network = ScoreModel(
                resolve_model(spec.path),
                protocol=config.protocol.training,
                trust_remote_code=config.trust_remote_code,
            )

    @primitive(
        "DP_PROTO",
        reads=("prompt_ids", "response_ids", "record"),
        writes=("reward", "reward_ok", "reward_error"),
        kind="replayable",
    )
    def compute_reward(self, rows: Rows) -> Columns:
        """Reward of each response; where ``reward_ok`` is false it is 0 and ``reward_error`` says why."""
        if self.verifiers:
            reward, ok, errors = self.verifiers.score(self._samples(rows))
        else:
            found = self.network.scores(rows.columns)
            ok = torch.isfinite(found)
            reward = torch.where(ok, found, 0.0)
            errors = ["" if good else f"the reward model gave {x}" for good, x in zip(ok, found.tolist(), strict=True)]
        self._check_rate(ok, errors)
        return {"reward": reward, "reward_ok": ok, "reward_error": text_column(errors)}

    def _samples(self, rows: Rows) -> list[dict[str, Any]]:
        responses = self.tokenizer.batch_decode(rows["response_ids"].tolist(), skip_special_tokens=True)
        records = [json.loads(record) for record in texts(rows["record"])]
        return [
            {"prompt": _question(record), "response": response, "record": record}
            for record, response in zip(records, responses, strict=True)
        ]

    def _check_rate(self, ok: torch.Tensor, errors: list[str]) -> None:
        """Over the whole group: all ranks stop, or none."""
        first = next((error for error in errors if error), "")
        said = [json.loads(each) for each in self.context.exchange(
            json.dumps([int((~ok).sum()), len(ok), first]).encode()
        )]
        failed, total = sum(each[0] for each in said), sum(each[1] for each in said)
        limit = self.spec.max_error_rate
        if failed > math.floor(limit * total):
            example = next(each[2] for each in said if each[2])
            raise RuntimeError(
                f"{failed} of {total} rewards failed, above models.{self.context.group}.max_error_rate={limit:g}; "
                f"the first: {example}"
            )

    def close(self) -> None:
        if self.verifiers:
            self.verifiers.close()


def _policy_path(config: Config) -> str:
    """The model whose tokens the reward reads: the first that has weights."""
    return next(config.models[name].path for name in config.algorithm.models if config.models[name].path)


def _question(record: dict[str, Any]) -> str:
    """The prompt's text: the record's own, or the last message."""
    prompt = record.get("messages", record.get("prompt", ""))
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
