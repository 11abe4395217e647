"""The actor: the policy that generates and learns. Generation runs inside its training ranks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import torch

from hpcflow.config import Config, Loss
from hpcflow.data.columns import Columns
from hpcflow.data.ids import seed_for
from hpcflow.data.needs import needs_of
from hpcflow.data.prompts import PromptSet
from hpcflow.data.resolve import resolve
from hpcflow.data.tokenizers import load_tokenizer
from hpcflow.engines import generation_engine
from hpcflow.reshard.layout import Layout
from hpcflow.workers.model import Network, with_loss
from hpcflow.workers.primitive import Context, Output, Primitive, Rows, primitive


class Actor(Network):
    """Trained by the training engine, sampled by the generation engine on the same ranks."""

    def __init__(self, context: Context, *, config: Config, unique: str) -> None:
        super().__init__(context, config=config, unique=unique)
        generation, sampling = config.protocol.generation, config.algorithm.sampling
        self.layout = Layout(d=context.size, t_g=generation.tensor_parallel)
        with context.span("build generation engine"):
            self.generation = generation_engine(generation.engine)(
                self.folder,
                protocol=generation,
                tensor_parallel=generation.tensor_parallel,
                unique=unique,
                max_prompt_tokens=config.data.max_prompt_tokens,
                max_tokens=sampling.max_tokens,
                trust_remote_code=config.trust_remote_code,
            )

    @classmethod
    def configured(cls, found: dict[str, Primitive], config: Config) -> dict[str, Primitive]:
        algorithm = config.algorithm
        found = with_loss(found, "update_actor", algorithm.policy_loss, needs_of)
        wanted = needs_of(algorithm.advantage.function)
        advantages = dataclasses.replace(
            found["compute_advantages"],
            reads=wanted.always,
            optional=wanted.optional,
            written_with=(("kl", "ref_log_probs"),),
        )
        return {**found, "compute_advantages": advantages}

    @functools.cached_property
    def _prompts(self) -> dict[str, PromptSet]:
        data = self.config.data
        tokenizer = load_tokenizer(self.folder, self.config.trust_remote_code)
        return {
            name: PromptSet(
                path, tokenizer, chat=data.chat, system=data.system, max_prompt_tokens=data.max_prompt_tokens
            )
            for name, path in (("train", data.train), ("eval", data.eval))
            if path
        }

    @primitive("3D_ALL_MICRO_DP", writes=("prompt_ids", "record"))
    def load_prompts(
        self, rows: Rows, parts: dict[int, tuple[int, int]], start: int, count: int, draws: int, source: str = "train"
    ) -> Output:
        """Prompts of positions start..start+count-1, ``draws`` rows each; every rank reads only its own rows.

        Positions go through the prompts in the seeded order of each epoch.
        """
        lo, hi = parts[self.context.rank]
        prompts = self._prompts[source]
        ids, columns = prompts.span_rows(self.config.seed, start, count, draws, lo, hi)
        return Output(columns, ids=ids)

    @primitive(
        "3D_ALL_MICRO_DP",
        reads=("prompt_ids",),
        writes=("response_ids", "rollout_log_probs", "old_log_probs", "truncated", "loss_mask"),
        kind="replayable",
        joins=True,
    )
    def generate_sequences(self, rows: Rows, greedy: bool = False) -> Columns:
        """One response per row, seeded by (run seed, sample id). ``greedy``: the most likely tokens instead.

        old_log_probs are the training engine's (``algorithm.old_log_probs=recompute``; then the first mini-batch's
        ratio is exactly 1) or the generation engine's (``rollout``).
        """
        self._refresh()
        prompts = rows["prompt_ids"].tolist()
        seeds = [seed_for(self.config.seed, sample, self.context.group) for sample in rows.ids.tolist()]
        self._agree(rows, prompts)
        with self.context.span("generate"):
            made = self.generation.generate(prompts, seeds, self.config.algorithm.sampling, greedy)
        columns: Columns = {
            "response_ids": made.response_ids,
            "rollout_log_probs": made.log_probs,
            "old_log_probs": made.log_probs,
            "truncated": made.truncated,
            "loss_mask": made.response_ids.like(torch.ones(len(made.response_ids.values), dtype=torch.bool)),
        }
        if self.config.algorithm.old_log_probs == "recompute" and not greedy:
            with self.context.span("log-probs"):
                columns["old_log_probs"] = self.engine.log_probs({**columns, "prompt_ids": rows["prompt_ids"]})
        return columns

    def _refresh(self) -> None:
        """Training layout to generation layout: bring the generation engine to the current weights."""
        if self.generation.version != self.version:
            with self.context.span("reshard"):
                self.generation.load_weights(self.engine.full_weights(), self.version)

    def _agree(self, rows: Rows, prompts: list[list[int]]) -> None:
        """All ranks generate with the same weights; the ranks of one engine with the same input.

        Different inputs on the ranks of one engine would give garbage without an error.
        """
        text = repr((rows.ids.tolist(), prompts)).encode()
        mine = hashlib.blake2b(text, digest_size=16).digest()
        said = self.context.exchange(self.generation.version.to_bytes(8, "little") + mine)
        versions = [int.from_bytes(each[:8], "little") for each in said]
        if len(set(versions)) > 1:
            raise RuntimeError(f"the ranks of {self.context.group} would generate with weight versions {versions}")
        _, _, replica = self.layout.generation(self.context.index)
        for other, each in enumerate(said):
            if self.layout.generation(other)[2] == replica and each[8:] != mine:
                raise RuntimeError(
                    f"ranks {self.context.index} and {other} of {self.context.group} form one generation engine but "
                    f"were given different prompts ({mine.hex()} and {each[8:].hex()})"
                )

    @primitive("3D_PROTO", reads=("prompt_ids", "response_ids"), writes=("old_log_probs",))
    def compute_log_prob(self, rows: Rows) -> Columns:
        """Log-probs of the responses under the current weights."""
        return {"old_log_probs": self.engine.log_probs(rows.columns)}

    @primitive("3D_PROTO", writes=("advantages", "returns", "loss_mask"))
    def compute_advantages(self, rows: Rows) -> Columns:
        """The configured advantage, where the data is; statistics over the whole batch from one number per row."""
        call = self.config.algorithm.advantage
        return resolve(call.function)(rows.ids, rows.columns, self.gather, **call.args)

    @primitive("3D_PROTO", reads=("prompt_ids", "response_ids", "loss_mask"), kind="advancing")
    def update_actor(self, rows: Rows) -> dict[str, float]:
        """One update by the configured policy loss; the weight version is one higher afterwards."""
        loss: Loss = self.config.algorithm.policy_loss
        return self.update(rows, loss)

    def close(self) -> None:
        self.generation.close()


