"""A tool as a node of the dataflow: a function of the user's own from a sample's text to a text."""

from __future__ import annotations

import torch

from hpcflow.config import Config
from hpcflow.data.columns import Columns, Ragged, text_column
from hpcflow.data.rewards import VerifierPool
from hpcflow.data.tokenizers import load_tokenizer
from hpcflow.workers.model import Model
from hpcflow.workers.primitive import Context, Rows, primitive
from hpcflow.workers.reward import as_samples, check_rate, policy_path


class Tool(Model):
    """f(prompt, response, record, **args) -> str in a pool of processes, where it may fail without harm: a
    sample whose call fails gets the empty text and its error. RuntimeError when their share exceeds
    ``max_error_rate``."""

    def __init__(self, context: Context, *, config: Config, unique: str) -> None:
        super().__init__(context, config=config, unique=unique)
        self.tokenizer = load_tokenizer(policy_path(config), config.trust_remote_code)
        spec = self.spec
        self.processes = VerifierPool(
            spec.function,
            processes=spec.processes,
            timeout_s=spec.timeout_s,
            retries=spec.retries,
            args=spec.args,
            returns="text",
        )

    @primitive(
        "DP_PROTO",
        reads=("response_ids", "record"),
        writes=("observation_ids", "observation_error"),
        kind="replayable",
    )
    def observe(self, rows: Rows) -> Columns:
        """What each response is told before it goes on, as tokens; none: it does not go on."""
        texts, errors = self._call(rows)
        ids = [self.tokenizer(text, add_special_tokens=False).input_ids if text else [] for text in texts]
        return {
            "observation_ids": Ragged.from_lists(ids, torch.int64),
            "observation_error": text_column(errors),
        }

    @primitive(
        "DP_PROTO", reads=("response_ids", "record"), writes=("prompt_ids", "record"), kind="replayable"
    )
    def write_prompts(self, rows: Rows) -> Columns:
        """A new batch about the same samples: each prompt is what the tool made of the response."""
        texts, _ = self._call(rows)
        return {
            "prompt_ids": Ragged.from_lists([self._prompt(text) for text in texts], torch.int64),
            "record": rows["record"],
        }

    def _prompt(self, text: str) -> list[int]:
        if not self.tokenizer.chat_template or self.config.data.chat is False:
            return self.tokenizer(text or " ").input_ids
        messages = [{"role": "user", "content": text}]
        if self.config.data.system is not None:
            messages = [{"role": "system", "content": self.config.data.system}, *messages]
        return list(
            self.tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        )

    def _call(self, rows: Rows) -> tuple[list[str], list[str]]:
        """(texts, errors)."""
        answers, errors, _ = self.processes.call(
            as_samples(self.tokenizer, rows["record"], rows["response_ids"])
        )
        check_rate(self, torch.tensor([not error for error in errors], dtype=torch.bool), errors)
        return ["" if error else answer for answer, error in zip(answers, errors, strict=True)], errors

    def close(self) -> None:
        self.processes.close()
