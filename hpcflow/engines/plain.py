"""Generation with nothing but a Hugging Face forward pass and its key-value cache.

For tests, and for machines without vLLM. Each rank holds a whole copy of the model and generates its own
prompts. Random numbers are drawn per sample, so what is sampled does not depend on which other prompts share
the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from hpcflow.engines.generation import Generated, check_lengths, check_prompts
from hpcflow.engines.token_model import quiet_transformers

if TYPE_CHECKING:
    from hpcflow.config import GenerationProtocol, Sampling


class PlainEngine:
    """The interface of `hpcflow.engines.vllm.VLLMEngine`; ``unique`` is not needed and tensor_parallel
    must be 1."""

    def __init__(
        self,
        path: str,
        *,
        protocol: GenerationProtocol,
        tensor_parallel: int,
        unique: str,
        max_prompt_tokens: int,
        max_tokens: int,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        check_lengths(max_prompt_tokens, max_tokens, protocol.max_model_len)
        if tensor_parallel != 1:
            raise ValueError(
                f"protocol.generation.tensor_parallel={tensor_parallel}: the plain engine does not split a "
                f"model; tensor_parallel=1 or engine=vllm works"
            )
        self.version: int | None = None
        self.protocol = protocol
        with quiet_transformers():
            self._model = AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, protocol.dtype), trust_remote_code=trust_remote_code
            ).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        ends = self._model.generation_config.eos_token_id
        self._ends = {self._tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the weights by full tensors under Hugging Face names."""
        own = dict(self._model.named_parameters())
        for name, tensor in weights:
            own.pop(name).copy_(tensor)
        assert not own, f"no weights came for {sorted(own)[:4]}"
        self.version = version

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], seeds: list[int], sampling: Sampling, greedy: bool = False
    ) -> Generated:
        """One response to each prompt; the random numbers of row i depend on ``seeds[i]`` (in [0, 2**63))
        alone.

        greedy: temperature 0, seeds unused. ValueError for a prompt that does not fit.
        """
        assert len(prompts) == len(seeds)
        check_prompts(prompts, sampling.max_tokens, self.protocol.max_model_len)
        size = self.protocol.max_num_seqs
        rows: list[_Row] = [_Row(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        for begin in range(0, len(rows), size):
            self._decode(rows[begin : begin + size], sampling, greedy or sampling.temperature == 0)
        return Generated.of(
            [row.tokens for row in rows], [row.log_probs for row in rows], [not row.ended for row in rows]
        )

    def _decode(self, rows: list[_Row], sampling: Sampling, greedy: bool) -> None:
        """Run one batch to its end. Prompts are padded on the left; ended rows ride along, ignored."""
        width = max(len(row.prompt) for row in rows)
        pads = torch.tensor([width - len(row.prompt) for row in rows])[:, None]
        tokens = torch.tensor([[0] * (width - len(row.prompt)) + row.prompt for row in rows])
        place = torch.arange(width + sampling.max_tokens)[None, :]
        mask = (place >= pads).long()
        position, cache, done = (place - pads).clamp(min=0), None, 0
        for _ in range(sampling.max_tokens):
            stop = done + tokens.shape[1]
            out = self._model(
                input_ids=tokens,
                attention_mask=mask[:, :stop],
                position_ids=position[:, done:stop],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache, done = out.past_key_values, stop
            logits = out.logits[:, -1].float()
            if not greedy:
                logits = truncate(logits / sampling.temperature, sampling.top_k, sampling.top_p)
            chosen = logits.argmax(-1) if greedy else self._draw(logits, rows)
            log_probs = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].tolist()
            for row, token, log_prob in zip(rows, chosen.tolist(), log_probs, strict=True):
                if not row.ended:
                    row.tokens.append(token)
                    row.log_probs.append(log_prob)
                    ends = token in self._ends or token in sampling.stop_token_ids
                    row.ended = ends or self._stopped(row, sampling.stop)
            if all(row.ended for row in rows):
                return
            tokens = chosen[:, None]

    @staticmethod
    def _draw(logits: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
        """argmax(p / e) with e exponential is a draw from p."""
        noise = torch.ones_like(logits)
        for index, row in enumerate(rows):
            if not row.ended:
                noise[index].exponential_(generator=row.generator)
        return (logits - noise.log()).argmax(-1)

    def _stopped(self, row: _Row, stop: list[str]) -> bool:
        return bool(stop) and any(text in self._tokenizer.decode(row.tokens) for text in stop)

    def close(self) -> None:
        """Drop the model."""
        del self._model


class _Row:
    """One response in the making."""

    def __init__(self, prompt: list[int], seed: int) -> None:
        self.prompt, self.tokens, self.log_probs, self.ended = prompt, [], [], False
        self.generator = torch.Generator().manual_seed(seed)


def truncate(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """float32 [rows, V] with -inf for all but the ``top_k`` likeliest tokens (0 = all) and, of those, all
    but the fewest likeliest whose probability reaches ``top_p``."""
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1.0:
        ordered, index = logits.sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, before >= top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits
