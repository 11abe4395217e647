"""Models known by their shape: ``shape:llama_70b`` is the folder ``$HPCFLOW_MODELS/llama_70b``.

Estimates, checks and job scripts need only the shape, which is written here, so they work on a machine that
does not have the weights. What is loaded must have that shape.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

_LLAMA_2 = {
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

# Touvron et al. 2023 (arXiv:2307.09288), sizes as in the models' own config.json.
SHAPES: dict[str, dict[str, Any]] = {
    "llama_7b": _LLAMA_2
    | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama_13b": _LLAMA_2
    | {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "llama_70b": _LLAMA_2
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def config_of(name: str) -> dict[str, Any]:
    """What the config.json of the shape says. ValueError for an unknown one."""
    if name not in SHAPES:
        near = difflib.get_close_matches(name, SHAPES, 1) or sorted(SHAPES)
        raise ValueError(
            f"there is no model shape {name!r}; works: {', '.join(f'shape:{each}' for each in near)}"
        )
    return dict(SHAPES[name])


def folder_of(name: str) -> Path:
    """The folder with the weights. ValueError when HPCFLOW_MODELS is not set, or what is there has another
    shape.
    """
    shape, models = config_of(name), os.environ.get("HPCFLOW_MODELS")
    if not models:
        raise ValueError(
            f"shape:{name} is a folder of $HPCFLOW_MODELS, which is not set; works: "
            f"export HPCFLOW_MODELS=/path with /path/{name} a Hugging Face folder, "
            f"or the path of a folder instead of shape:{name}"
        )
    folder = Path(models).expanduser() / name
    if (folder / "config.json").is_file():
        found = json.loads((folder / "config.json").read_text())
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            if found.get(key) != shape[key]:
                raise ValueError(f"{folder} has {key}={found.get(key)}, shape:{name} has {shape[key]}")
    return folder
