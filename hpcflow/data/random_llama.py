"""Small Llamas with random weights, and their tokenizers: for tests and for measurements of speed.

A path such as ``random:llama?vocab_size=512&layers=2&seed=3`` names one; `Recipe` lists the parameters.
Weights depend on the parameters alone, not on the version of torch or transformers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
VERSION = 1  # of what is written; part of the folder's name, so raising it makes new folders
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """What a ``random:llama`` path may set.

    vocab: "bytes" = byte-level BPE with a chat template; "words" = the words t4, t5, ... separated by spaces,
    without one. head: "lm", or "score" for a sequence classifier with one label (a reward model). std: of all
    matrices; norm weights are uniform in [0.5, 1.5], so that an implementation that forgets one is seen. vLLM
    on CPUs takes only some head sizes (hidden_size / heads), 32 and 64 among them.
    """

    vocab_size: int = 512
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    positions: int = 1024
    tie: bool = False
    std: float = 0.08
    seed: int = 0
    vocab: str = "bytes"
    head: str = "lm"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"random:llama: {name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"random:llama: seed={self.seed} must be in [0, 2**32)")
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"random:llama: hidden_size={self.hidden_size} must be a multiple of 2 * heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"random:llama: kv_heads={self.kv_heads} must divide heads={self.heads}")
        for name, valid in (("vocab", ("bytes", "words")), ("head", ("lm", "score"))):
            if getattr(self, name) not in valid:
                raise ValueError(
                    f"random:llama: {name}={getattr(self, name)!r}; it must be {' or '.join(valid)}"
                )
        least = len(SPECIAL) + (256 if self.vocab == "bytes" else 1)
        if self.vocab_size < least:
            raise ValueError(
                f"random:llama: vocab_size={self.vocab_size}; vocab={self.vocab} needs at least {least}"
            )

    def folder_name(self) -> str:
        text = json.dumps([VERSION, asdict(self)], sort_keys=True)
        return f"random-llama-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def config(self) -> dict[str, Any]:
        """As ``config.json``."""
        return {
            "model_type": "llama",
            "dtype": "float32",
            "architectures": ["LlamaForCausalLM" if self.head == "lm" else "LlamaForSequenceClassification"],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": max(8, self.hidden_size * 8 // 3 // 8 * 8),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden_size // self.heads,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tie,
            "initializer_range": self.std,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **({"num_labels": 1} if self.head == "score" else {}),
        }

    def make(self, folder: Path) -> None:
        """Write weights (float32), configuration and tokenizer into ``folder``."""
        import torch
        from safetensors.torch import save_file
        from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

        settings = self.config()
        del settings["model_type"]
        config = LlamaConfig(**settings)
        with torch.device("meta"):
            model = (LlamaForCausalLM if self.head == "lm" else LlamaForSequenceClassification)(config)
        weights = {}
        for name, parameter in model.named_parameters():
            # a stream per parameter: a model with more layers has the same first layers
            stream = torch.Generator().manual_seed(zlib.crc32(name.encode(), self.seed))  # it takes 32 bits
            values = torch.empty(parameter.shape, dtype=torch.float32)
            if parameter.dim() == 1:
                weights[name] = values.uniform_(0.5, 1.5, generator=stream)
            else:
                weights[name] = values.normal_(0.0, self.std, generator=stream)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        self.tokenizer().save_pretrained(folder)
        (folder / "hpcflow.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    def tokenizer(self) -> Any:
        """The tokenizer, of exactly ``vocab_size`` tokens."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        special = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
        if self.vocab == "words":
            words = SPECIAL + [f"t{i}" for i in range(len(SPECIAL), self.vocab_size)]
            tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
            tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)
        tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = list(itertools.islice(_merges(), self.vocab_size - len(tokens)))
        tokens += [a + b for a, b in merges]
        tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, padding_side="left", **special
        )


def _merges() -> Any:
    """BPE merges without end: pairs of frequent letters first, then longer pieces of them."""
    letters = "etaoinshrdlucmfwygpbvkxqjz"
    space = "\u0120"  # how byte-level BPE spells a leading space
    yield from ((space, a) for a in letters)
    pieces = list(letters)
    while True:
        longer = list(itertools.product(pieces, letters))
        yield from longer
        pieces = [a + b for a, b in longer]


def parse(text: str) -> Recipe:
    """From what follows ``random:`` in a path. ValueError names the parameter, the value and what works."""
    kind, _, query = text.partition("?")
    if kind != "llama":
        raise ValueError(f"random:{kind} is not known; it must be random:llama")
    types = {f.name: f.type for f in fields(Recipe)}
    values: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in types:
            raise ValueError(f"random:llama has no parameter {name!r}; it has {', '.join(types)}")
        values[name] = _parse_value(name, value, types[name])
    return Recipe(**values)


def _parse_value(name: str, value: str, kind: Any) -> Any:
    if kind == "str":
        return value
    if kind == "bool":
        if value in ("true", "false"):
            return value == "true"
        raise ValueError(f"random:llama: {name}={value!r}; it must be true or false")
    try:
        return int(value) if kind == "int" else float(value)
    except ValueError:
        raise ValueError(f"random:llama: {name}={value!r}; it must be a number ({kind})") from None
