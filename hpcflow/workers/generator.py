"""A policy as the source of samples: prompts, responses, further turns of a response."""

from __future__ import annotations

import functools
import hashlib
import traceback
from typing import Any

import torch

from hpcflow.config import Config
from hpcflow.data.columns import Columns, Ragged
from hpcflow.data.ids import seed_for
from hpcflow.data.prompts import PromptSet
from hpcflow.data.tokenizers import load_tokenizer
from hpcflow.engines import generation_engine
from hpcflow.engines.generation import Generated
from hpcflow.reshard.layout import Layout
from hpcflow.workers.model import Network
from hpcflow.workers.primitive import RECOVERED, Context, Output, Rows, primitive

SAMPLED = ("response_ids", "rollout_log_probs", "old_log_probs", "truncated", "loss_mask")


class Generator(Network):
    """Weights of the training engine, sampled by the generation engine on the same ranks."""

    def __init__(self, context: Context, *, config: Config, unique: str) -> None:
        super().__init__(context, config=config, unique=unique)
        self.layout = Layout(d=context.size, t_g=config.protocol.generation.tensor_parallel)
        self.generation = self._build_engine()
        self._failed: dict[int, str] = {}  # generation engines of the call at hand that failed, and how

    def _build_engine(self) -> Any:
        """The generation engine, without the current weights; collective over the pool."""
        config = self.config
        with self.context.span("build generation engine"):
            return generation_engine(config.protocol.generation.engine)(
                self.folder,
                protocol=config.protocol.generation,
                tensor_parallel=config.protocol.generation.tensor_parallel,
                unique=self.unique,
                max_prompt_tokens=config.data.max_prompt_tokens,
                max_tokens=config.algorithm.sampling.max_tokens,
                trust_remote_code=config.trust_remote_code,
            )

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
        self,
        rows: Rows,
        parts: dict[int, tuple[int, int]],
        start: int,
        count: int,
        draws: int,
        source: str = "train",
    ) -> Output:
        """Prompts of positions start..start+count-1, ``draws`` rows each; every rank reads only its own rows.

        Positions go through the prompts in the seeded order of each epoch.
        """
        lo, hi = parts[self.context.rank]
        prompts = self._prompts[source]
        ids, columns = prompts.span_rows(self.config.seed, start, count, draws, lo, hi)
        return Output(columns, ids=ids)

    @primitive("3D_ALL_MICRO_DP", reads=("prompt_ids",), writes=SAMPLED, kind="replayable", joins=True)
    def generate_sequences(self, rows: Rows, greedy: bool = False, purpose: str = "") -> Output:
        """One response per row, seeded by (run seed, sample id). ``greedy``: the most likely tokens instead.

        old_log_probs are the training engine's (``algorithm.old_log_probs=recompute``; then the first
        mini-batch's ratio is exactly 1) or the generation engine's (``rollout``). ``purpose`` sets the random
        numbers apart from those of training.
        """
        made = self._generate(rows, rows["prompt_ids"].tolist(), greedy=greedy, purpose=purpose)
        mask = torch.ones(len(made.response_ids.values), dtype=torch.bool)
        columns: Columns = {
            "response_ids": made.response_ids,
            "rollout_log_probs": made.log_probs,
            "truncated": made.truncated,
            "loss_mask": made.response_ids.like(mask),
        }
        return self._with_log_probs(rows, columns, recompute=not (greedy or purpose))

    @primitive("3D_ALL_MICRO_DP", reads=("prompt_ids",), writes=("greedy_ids",), kind="replayable")
    def generate_greedy(self, rows: Rows) -> Output:
        """The most likely response to each prompt under the current weights; equal prompts of a rank go
        once."""
        prompts = rows["prompt_ids"].tolist()
        distinct = list({tuple(prompt): None for prompt in prompts})
        made = self._generate(rows, [list(prompt) for prompt in distinct], greedy=True)
        place = {prompt: index for index, prompt in enumerate(distinct)}
        index = torch.tensor([place[tuple(p)] for p in prompts]).long()
        return Output({"greedy_ids": made.response_ids.select(index)}, value=self._recovered())

    @primitive(
        "3D_ALL_MICRO_DP",
        reads=(
            "prompt_ids",
            "response_ids",
            "rollout_log_probs",
            "truncated",
            "loss_mask",
            "observation_ids",
        ),
        writes=SAMPLED,
        kind="replayable",
        joins=True,
    )
    def continue_sequences(self, rows: Rows, turn: int) -> Output:
        """The next turn of each response that was given an observation; the others stay as they are.

        The observation's tokens are appended, with log-prob 0 and loss_mask false: nobody sampled them. Then
        come new tokens, as many as sampling allows, seeded by (run seed, sample id, ``turn``).
        """
        index = torch.nonzero(rows["observation_ids"].lengths > 0).flatten()
        prompts, seen = rows["prompt_ids"].tolist(), rows["observation_ids"].tolist()
        grown = {name: rows[name].tolist() for name in ("response_ids", "rollout_log_probs", "loss_mask")}
        texts = [prompts[row] + grown["response_ids"][row] + seen[row] for row in index.tolist()]
        made = self._generate(rows, texts, turn=turn, index=index)
        sampled = zip(index.tolist(), made.response_ids.tolist(), made.log_probs.tolist(), strict=True)
        for row, tokens, log_probs in sampled:
            grown["response_ids"][row] += seen[row] + tokens
            grown["rollout_log_probs"][row] += [0.0] * len(seen[row]) + log_probs
            grown["loss_mask"][row] += [False] * len(seen[row]) + [True] * len(tokens)
        columns: Columns = {
            name: Ragged.from_lists(lists, rows[name].values.dtype) for name, lists in grown.items()
        }
        columns["truncated"] = rows["truncated"].index_put((index,), made.truncated)
        return self._with_log_probs(rows, columns, recompute=True)

    def _generate(
        self,
        rows: Rows,
        prompts: list[list[int]],
        *,
        greedy: bool = False,
        turn: int = 0,
        purpose: str = "",
        index: torch.Tensor | None = None,
    ) -> Generated:
        """Responses to ``prompts``, which belong to rows ``index`` (all, one each; greedy: any)."""
        self._refresh()
        self._agree(rows, prompts)
        ids = rows.ids if index is None else rows.ids[index]
        node = f"{self.context.group}/{purpose}" if purpose else self.context.group
        seeds = [seed_for(self.config.seed, sample, node, turn) for sample in ids.tolist()][: len(prompts)]
        with self.context.span("generate"):
            return self._generate_or_rebuild(prompts, seeds, greedy)

    def _generate_or_rebuild(self, prompts: list[list[int]], seeds: list[int], greedy: bool) -> Generated:
        """Generate; where an engine raises, all are built anew and the samples of those that failed are
        redone.

        Sampling depends on seeds alone, so what is redone is what would have come. All ranks agree on what
        failed; building and loading weights are collective. A wrong input (ValueError) fails the call at
        once. RuntimeError with the traceback when an engine fails a second time.
        """
        self._failed, made = {}, None
        while True:
            error = ""
            if made is None:
                try:
                    made = self.generation.generate(prompts, seeds, self.config.algorithm.sampling, greedy)
                except ValueError:
                    raise
                except Exception:
                    error = traceback.format_exc()
            said = [each.decode() for each in self.context.exchange(error.encode())]
            failed = {self.layout.generation(rank)[2]: text for rank, text in enumerate(said) if text}
            if not failed:
                return made
            text = next(iter(failed.values()))
            if self._failed:
                raise RuntimeError(f"a generation engine of {self.context.group} failed twice:\n{text}")
            self._failed = failed
            if self.context.index == 0:
                print(
                    f"generation engines {sorted(failed)} of {self.context.group} failed and are rebuilt:\n{text}",
                    flush=True,
                )
            if self.layout.generation(self.context.index)[2] in failed:
                made = None
            self.generation.close()
            self.generation = self._build_engine()
            self._refresh()

    def _with_log_probs(self, rows: Rows, columns: Columns, recompute: bool) -> Output:
        """``columns`` with old_log_probs; by the training engine also the `gap` between the engines.

        With top_p or top_k it also holds what renormalising the truncated distribution adds.
        """
        rollout = columns["rollout_log_probs"]
        columns["old_log_probs"] = rollout
        if not recompute or self.config.algorithm.old_log_probs == "rollout":
            return Output(columns, value=self._recovered())
        with self.context.span("log-probs"):
            old = self.engine.log_probs({**columns, "prompt_ids": rows["prompt_ids"]})
        columns["old_log_probs"] = old
        facts = self.gap((old.values - rollout.values)[columns["loss_mask"].values])
        return Output(columns, value=facts | (self._recovered() or {}))

    def gap(self, difference: torch.Tensor) -> dict[str, float]:
        """How far training and generation engine are apart: the mean of |``difference``| and its largest value
        over all ranks, as metrics. ``difference``: of the log-probs of this rank's sampled tokens, float32
        [n]."""
        gap = difference.abs()
        largest = torch.cat(self.gather(gap.max()[None] if len(gap) else gap))
        return {
            "rollout_gap": self.mean(gap),
            "rollout_gap_max": float(largest.max()) if len(largest) else 0.0,
        }

    def _recovered(self) -> dict[str, Any] | None:
        """For the record, when engines of the call at hand were rebuilt: how many, and why."""
        if not self._failed:
            return None
        found: dict[str, Any] = {"engines_rebuilt": float(len(self._failed))}
        if self.context.index == 0:  # all ranks know; one tells
            (first, text), *_ = self._failed.items()
            name = f"engine {first} of {self.context.group}"
            found[RECOVERED] = f"{name} raised and was rebuilt: {text[-2000:]}"
        return found

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
            raise RuntimeError(
                f"the ranks of {self.context.group} would generate with weight versions {versions}"
            )
        _, _, replica = self.layout.generation(self.context.index)
        for other, each in enumerate(said):
            if self.layout.generation(other)[2] == replica and each[8:] != mine:
                raise RuntimeError(
                    f"ranks {self.context.index} and {other} of {self.context.group} form one generation engine but "
                    f"were given different prompts ({mine.hex()} and {each[8:].hex()})"
                )

    def close(self) -> None:
        self.generation.close()
