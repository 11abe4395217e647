"""Prompts: from a file to token ids and sample ids, each rank only its own rows.

Prompts are numbered without end: global position p lies in epoch p // size, and is there the p % size -th
prompt of the epoch's permutation. Ids, order and tokens are functions of (seed, position, draw) alone.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcflow.data import verifiers
from hpcflow.data.columns import Columns, Ragged, text_column
from hpcflow.data.ids import sample_id

MASK = (1 << 64) - 1
JSON_LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


class PromptSet:
    """The prompts of a file, or of a reasoning-gym task.

    path: JSON lines (also gzipped), parquet, or ``reasoning_gym:<task>?size=...`` (see
    `hpcflow.data.verifiers`). A record holds "prompt" (text, or a list of messages) or "messages" (list of
    {"role", "content"}); its other keys are kept for the reward. chat: apply the tokenizer's chat template;
    None = if it has one. system: None leaves the template's default system message, any text (also "")
    replaces it, unless the record brings its own. ValueError names file and line (parquet: row) of whatever
    cannot be used.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        *,
        chat: bool | None = None,
        system: str | None = None,
        max_prompt_tokens: int,
    ) -> None:
        self.path, self.tokenizer, self.system = path, tokenizer, system
        self.max_prompt_tokens = max_prompt_tokens
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat and not has_template:
            raise ValueError("data.chat=true, but the model's tokenizer has no chat template; use chat=false")
        self.chat = has_template if chat is None else chat
        self.records, self.places = _read(path)
        if len(self.records) == 0:
            raise ValueError(
                f'{path} holds no prompts; it needs one record a line, e.g. {{"prompt": "Hello."}}'
            )

    def __len__(self) -> int:
        return len(self.records)

    def record(self, index: int) -> dict[str, Any]:
        """The record as it stands in the file."""
        return self.records[index]

    def prompt_ids(self, index: int) -> list[int]:
        """Token ids of one prompt, as the model gets them."""
        record = self.records[index]
        content = record.get("messages", record.get("prompt"))
        if isinstance(content, str):
            if self.chat:
                ids = self._chat_ids([{"role": "user", "content": content}], index)
            else:
                ids = self.tokenizer(content).input_ids
        elif self._are_messages(content):
            ids = self._chat_ids(content, index)
        else:
            raise ValueError(
                f'{self._place(index)}: no usable prompt; a record needs "prompt" (text) or "messages" '
                f'(list of {{"role", "content"}}), this one has the keys {", ".join(record) or "(none)"}'
            )
        if not 0 < len(ids) <= self.max_prompt_tokens:
            raise ValueError(
                f"{self._place(index)}: the prompt has {len(ids)} tokens; data.max_prompt_tokens="
                f"{self.max_prompt_tokens} allows 1 to {self.max_prompt_tokens}"
            )
        return ids

    def span(self, seed: int, start: int, count: int, draws: int) -> tuple[torch.Tensor, Columns]:
        """Samples of the global positions start..start+count-1, each ``draws`` times.

        (ids int64 [count * draws], columns prompt_ids and record), ordered by position, then draw.
        """
        return self.span_rows(seed, start, count, draws, 0, count * draws)

    def span_rows(
        self, seed: int, start: int, count: int, draws: int, lo: int, hi: int
    ) -> tuple[torch.Tensor, Columns]:
        """Rows lo..hi-1 of `span`, without making the others."""
        assert 0 <= lo <= hi <= count * draws and start >= 0
        ids, tokens, records = [], [], []
        for position in range(start + lo // draws, start + -(-hi // draws)):
            epoch, offset = divmod(position, len(self))
            index = int(permutation(seed, epoch, len(self))[offset])
            first = (position - start) * draws
            drawn = range(max(lo, first) - first, min(hi, first + draws) - first)
            ids += [sample_id(epoch, index, draw) for draw in drawn]
            tokens += [self.prompt_ids(index)] * len(drawn)
            records += [json.dumps(self.records[index], ensure_ascii=False)] * len(drawn)
        columns = {"prompt_ids": Ragged.from_lists(tokens, torch.int64), "record": text_column(records)}
        return torch.tensor(ids, dtype=torch.int64), columns

    def _chat_ids(self, messages: list[dict[str, str]], index: int) -> list[int]:
        if not self.chat:
            raise ValueError(
                f"{self._place(index)}: messages need a chat template; use data.chat=true and a model whose "
                'tokenizer has one, or records with "prompt"'
            )
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                f"{self._place(index)}: the last message is the assistant's; there is nothing to answer"
            )
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return list(
            self.tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        )

    @staticmethod
    def _are_messages(content: Any) -> bool:
        return (
            isinstance(content, list)
            and len(content) > 0
            and all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in content
            )
        )

    def _place(self, index: int) -> str:
        return f"{self.path}:{self.places[index]}"


@functools.lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """int64 [size]: a permutation that depends on the three numbers alone, not on a library's generator.

    Prompts are sorted by a hash (the finaliser of SplitMix64) of their number, the seed and the epoch.
    """
    with np.errstate(over="ignore"):
        start = np.uint64(_mix(_mix(seed & MASK) + epoch & MASK))
        keys = start + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        keys = (keys ^ keys >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ keys >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        keys ^= keys >> np.uint64(31)
    return np.argsort(keys, kind="stable")


def _mix(x: int) -> int:
    x = x + 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def _read(path: str) -> tuple[Sequence[dict[str, Any]], Sequence[int]]:
    """(records, where each stands in the file)."""
    if path.startswith(verifiers.SCHEME):
        records = verifiers.ReasoningGymRecords(path)
        return records, range(len(records))
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(
            f"prompt file {path!r} does not exist; it must be JSON lines, parquet or reasoning_gym:<task>"
        )
    if file.suffix == ".parquet":
        return _read_parquet(file)
    if file.name.endswith(JSON_LINES):
        return _read_json_lines(file)
    raise ValueError(f"prompt file {path!r}: its name must end in .parquet, {', '.join(JSON_LINES)}")


def _read_json_lines(file: Path) -> tuple[list[dict[str, Any]], list[int]]:
    records, places = [], []
    with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{file}:{number}: not JSON ({error}); each line must be one JSON object"
                ) from None
            if not isinstance(record, dict):
                raise ValueError(
                    f"{file}:{number}: a {type(record).__name__}; each line must be one JSON object"
                )
            records.append(record)
            places.append(number)
    return records, places


def _read_parquet(file: Path) -> tuple[list[dict[str, Any]], range]:
    import pyarrow
    import pyarrow.parquet

    try:
        records = pyarrow.parquet.ParquetFile(file).read().to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file}: not a parquet file ({error})") from None
    for row, record in enumerate(records):
        try:
            json.dumps(record)
        except TypeError as error:
            raise ValueError(
                f"{file}:{row}: {error}; columns must be numbers, texts, lists and structures"
            ) from None
    return records, range(len(records))
