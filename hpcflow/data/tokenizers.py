"""Tokenizers, loaded from the model's own folder and never from the network."""

from __future__ import annotations

import os
from typing import Any

from hpcflow.data.models import resolve_model

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is first imported


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The Hugging Face tokenizer of a model path (see `hpcflow.data.models`).

    ``trust_remote_code`` lets Python code in the folder run. ValueError when the folder holds no tokenizer.
    """
    from transformers import AutoTokenizer

    folder = resolve_model(path)
    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"no tokenizer can be loaded from {path!r} (looked in {folder}): {error}") from error
