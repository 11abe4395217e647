"""The actor: the policy that generates and learns. Generation runs inside its training ranks."""

from __future__ import annotations

import dataclasses
import functools

import torch

from hpcflow.config import Config
from hpcflow.data.columns import Columns, Ragged, flat
from hpcflow.data.ids import seed_for
from hpcflow.data.needs import needs_of
from hpcflow.data.resolve import resolve
from hpcflow.data.texts import TextSet
from hpcflow.data.tokenizers import load_tokenizer
from hpcflow.workers.collect import COLLECTED, Collector
from hpcflow.workers.generator import Generator
from hpcflow.workers.model import Beside, Heard, with_loss
from hpcflow.workers.primitive import Context, Output, Primitive, Rows, primitive

ADVANTAGES = ("advantages", "returns", "loss_mask")
ROLLOUT = "rollout_log_probs"


class Actor(Generator):
    """A generator that is trained by the configured advantage and policy loss."""

    def __init__(self, context: Context, *, config: Config, unique: str) -> None:
        super().__init__(context, config=config, unique=unique)
        if config.algorithm.state is not None:
            self.state = dict(config.algorithm.state.initial)
        self._collector = Collector(config.algorithm.batch.prompts, context.index)

    @classmethod
    def configured(cls, found: dict[str, Primitive], config: Config) -> dict[str, Primitive]:
        algorithm = config.algorithm
        found = with_loss(found, "update_actor", algorithm.policy_loss, needs_of)
        wanted = needs_of(algorithm.advantage.function)
        found["compute_advantages"] = dataclasses.replace(
            found["compute_advantages"],
            reads=wanted.always,
            optional=wanted.optional,
            writes=ADVANTAGES + wanted.writes,
            written_with=(("kl", "ref_log_probs"),),
        )
        extra = needs_of(algorithm.state.function).always if algorithm.state else ()
        if algorithm.pretrain and algorithm.pretrain.coef:
            extra += ("pretrain_ids",)
        update = found["update_actor"]
        new = tuple(name for name in extra if name not in update.reads)
        optional = update.optional
        if algorithm.old_log_probs == "rollout" and ROLLOUT not in update.reads + optional:
            optional += (ROLLOUT,)
        found["update_actor"] = dataclasses.replace(update, reads=update.reads + new, optional=optional)
        return found

    @primitive("3D_PROTO", reads=("prompt_ids", "response_ids"), writes=("old_log_probs",))
    def compute_log_prob(self, rows: Rows) -> Columns:
        """Log-probs of the responses under the current weights."""
        return {"old_log_probs": self.engine.log_probs(rows.columns)}

    @primitive("3D_PROTO", writes=ADVANTAGES)
    def compute_advantages(self, rows: Rows) -> Columns:
        """The configured advantage, where the data is; statistics over the whole batch from one number per
        row."""
        call = self.config.algorithm.advantage
        return resolve(call.function)(rows.ids, rows.columns, self.gather, **call.args, **self.state)

    @primitive("3D_PROTO", reads=("prompt_ids",), writes=("pretrain_ids", "pretrain_loss"))
    def compute_loss(self, rows: Rows) -> Output:
        """A pretraining text for each sample, drawn by its id, and the loss per token of each under the
        current weights (at the temperature of sampling): pretrain_ids ragged int64, pretrain_loss float32
        [rows]."""
        texts = [
            self._texts[seed_for(self.config.seed, i, "pretrain") % len(self._texts)]
            for i in rows.ids.tolist()
        ]
        ids = Ragged.from_lists(texts, torch.int64)
        found = self.engine.log_probs(_as_response(ids))
        loss = torch.tensor([-float(row.double().mean()) for row in found.split()])
        return Output({"pretrain_ids": ids, "pretrain_loss": loss}, value={"pretrain_loss": self.mean(loss)})

    @functools.cached_property
    def _texts(self) -> TextSet:
        pretrain = self.config.algorithm.pretrain
        tokenizer = load_tokenizer(self.folder, self.config.trust_remote_code)
        return TextSet(self.config.data.pretrain, tokenizer, max_tokens=pretrain.max_tokens)

    @primitive("3D_PROTO", reads=("prompt_ids", "response_ids", "loss_mask"), kind="advancing")
    def update_actor(self, rows: Rows) -> dict[str, float]:
        """One update by the configured policy loss, beside it the pretraining loss if it counts; the weight
        version is one higher afterwards, and the state is what its function makes of this batch.

        With ``algorithm.old_log_probs=rollout`` nothing else computes the training engine's log-probs of the
        samples: the gap between the engines is that of the first mini-batch's counted tokens, before a step.
        """
        algorithm = self.config.algorithm
        beside: list[Beside] = []
        if "pretrain_ids" in rows.columns:
            pretrain = algorithm.pretrain
            columns = _as_response(rows["pretrain_ids"])
            beside.append(("pretrain", columns, pretrain.function, pretrain.coef))
        compares = algorithm.old_log_probs == "rollout" and ROLLOUT in rows.columns
        heard: list[Heard] = []
        metrics = self.update(rows, algorithm.policy_loss, beside, heard if compares else None)
        if compares:
            differences = [(new - flat(part[ROLLOUT]))[flat(part["loss_mask"])] for new, part in heard]
            metrics |= self.gap(torch.cat([torch.empty(0), *differences]))
        if algorithm.state is not None:
            call = algorithm.state
            self.state = resolve(call.function)(self.state, rows.ids, rows.columns, self.gather, **call.args)
        return metrics | self.state

    # -- dynamic sampling

    @primitive("3D_PROTO", reads=COLLECTED, kind="replayable")
    def keep_groups(self, rows: Rows) -> int:
        """Keep these samples for `take_groups`. Returns how many prompts the batch still lacks whose draws
        teach something: not all their advantages are 0."""
        advantages = self.compute_advantages(rows)["advantages"]
        teaches = torch.tensor([bool((row != 0).any()) for row in advantages.split()], dtype=torch.bool)
        return self._collector.add(rows, teaches, self.gather)

    @primitive("3D_PROTO", writes=COLLECTED)
    def take_groups(self, rows: Rows, parts: dict[int, tuple[int, int]]) -> Output:
        """The batch: prompts that teach something in the order in which they were kept, filled up with
        others."""
        total = max(hi for _, hi in parts.values())
        return self._collector.take(*parts[self.context.rank], total, self.context.exchange)


def _as_response(ids: Ragged) -> Columns:
    """Each text as the response to its own first token."""
    rows = ids.split()
    rest = Ragged.from_lists([row[1:] for row in rows], torch.int64)
    return {
        "prompt_ids": Ragged.from_lists([row[:1] for row in rows], torch.int64),
        "response_ids": rest,
        "loss_mask": rest.like(torch.ones(len(rest.values), dtype=torch.bool)),
    }
