"""Plain texts for language modelling beside reinforcement learning: token ids of one text each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class TextSet:
    """The records of a JSON lines file with the key "text". ``self[i]``: its token ids, with the
    end-of-sequence token if the tokenizer has one, cut to ``max_tokens``. ValueError names file and line of
    what cannot be used."""

    def __init__(self, path: str, tokenizer: Any, *, max_tokens: int) -> None:
        self.path, self.tokenizer, self.max_tokens = path, tokenizer, max_tokens
        self._texts = [_text(path, n, line) for n, line in enumerate(_lines(path), 1) if line.strip()]
        if not self._texts:
            raise ValueError(f'{path} holds no texts; it needs one record a line, e.g. {{"text": "Hello."}}')

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> list[int]:
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        ids = list(self.tokenizer(self._texts[index]).input_ids) + end
        if len(ids) < 2:
            raise ValueError(f"{self.path}: text {index + 1} has {len(ids)} tokens; a text needs two")
        return ids[: self.max_tokens]


def _lines(path: str) -> list[str]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f'data.pretrain={path}: there is no such file; it needs JSON lines with "text"')
    return file.read_text().splitlines()


def _text(path: str, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str) or not text:
        raise ValueError(f'{path}:{number}: not a JSON object with a "text"')
    return text
