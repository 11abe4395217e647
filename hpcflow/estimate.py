"""How much memory a run will need, from the config and the models' ``config.json`` alone.

Bytes per parameter follow the rule that reproduces the smallest clusters on which the HybridFlow paper
(EuroSys 2025) could run each of its models: 18 for a model trained in mixed precision (bfloat16 weights 2,
float32 gradients 4, master weights and two moments 12), 2 for one that is only evaluated, both sharded over
the ranks of the pool. Generation holds one more copy of the actor, in its own type and split over its
tensor-parallel ranks only.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hpcflow.config import Config, ModelSpec
from hpcflow.data.models import model_config

GIB = 2**30
BYTES = {"bfloat16": 2, "float32": 4}
TRAINED_BYTES = {"bfloat16": 18, "float32": 16}

PROCESS_GIB = 0.4
"""Resident size of a rank that has imported torch and transformers."""
VLLM_GIB = 0.3
"""What vLLM adds to it."""
VERIFIER_GIB = 0.06
"""One process that computes rewards."""

ACTIVATION_BYTES = 17
"""Kept for the backward pass per token, layer and hidden unit, in units of the computation's type
(Korthikanti et al. 2022, section 4.1: 34 bytes at 2 bytes each, without dropout masks and attention
scores)."""
LOGIT_BYTES = 12
"""Per response token and vocabulary entry: float32 logits, their log-softmax and gradient."""


@dataclass(frozen=True)
class ModelFacts:
    """What a model's ``config.json`` says: counts and sizes in elements and tokens."""

    params: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int | None
    needs_code: bool

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding."""
        return self.vocab * self.hidden

    def kv_bytes(self, dtype: str) -> int:
        """Bytes of keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[dtype]


Facts = dict[str, ModelFacts]
"""By model, of those that have weights."""


def model_facts(path: str) -> ModelFacts:
    """Of a model that is neither made nor loaded. ValueError when it is missing or says too little."""
    config = model_config(path)
    text = config.get("text_config") or config
    try:
        hidden, layers, heads = text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"]
        vocab = text["vocab_size"]
    except KeyError as error:
        raise ValueError(
            f"config.json of {path} has no {error}; it must describe a decoder language model"
        ) from error
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or hidden // heads
    stored = stored_params(Path(path)) if Path(path).is_dir() else None
    return ModelFacts(
        params=stored or llama_params(text, kv_heads, head_dim),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        max_positions=text.get("max_position_embeddings"),
        needs_code="auto_map" in config,
    )


def llama_params(text: dict[str, Any], kv_heads: int, head_dim: int) -> int:
    """Parameters of a Llama-shaped model: gated feed-forward, no biases."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    feed_forward = 3 * hidden * text.get("intermediate_size", 4 * hidden)
    embeddings = text["vocab_size"] * hidden * (1 if text.get("tie_word_embeddings") else 2)
    return embeddings + text["num_hidden_layers"] * (attention + feed_forward + 2 * hidden) + hidden


def stored_params(folder: Path) -> int | None:
    """Parameters in the safetensors files of ``folder``, by their headers; None where there are none."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        count += sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return count or None


def rank_memory(config: Config, facts: Facts, *, gpu: bool = False) -> dict[str, dict[str, float]]:
    """GiB of one rank at its peak, by pool and purpose. ``facts`` by model, of those that have weights.

    Loading needs no more: each rank reads its own part of the files straight into its shards. ``gpu``: of the
    memory of its GPU, where no processes live.
    """
    return {
        name: _pool_memory(config, pool.ranks, pool.models, facts, gpu)
        for name, pool in config.placement.pools.items()
    }


def total_memory(config: Config, facts: Facts) -> float:
    """GiB of all ranks together, controller and recorder included."""
    pools = config.placement.pools
    workers = sum(
        pools[name].ranks * sum(parts.values()) for name, parts in rank_memory(config, facts).items()
    )
    return workers + 2 * PROCESS_GIB


def _pool_memory(config: Config, ranks: int, models: list[str], facts: Facts, gpu: bool) -> dict[str, float]:
    generation, dtype = config.protocol.generation, config.protocol.training.dtype
    parts: dict[str, float] = {"process": PROCESS_GIB}
    working = [0.0]
    for name in models:
        spec = config.models[name]
        if spec.function and not gpu:
            parts[f"{name} processes"] = spec.processes * VERIFIER_GIB
        if name not in facts:
            continue
        per_param = TRAINED_BYTES[dtype] if spec.optimizer else BYTES[dtype]
        parts[name] = per_param * facts[name].params / ranks / GIB
        working.append(_pass_bytes(config, spec, facts[name]) / GIB)
        if spec.worker == "actor":
            share = BYTES[generation.dtype] / generation.tensor_parallel
            parts[f"{name} generation"] = share * facts[name].params / GIB
            parts["kv cache"] = generation.kv_cache_gib
            if generation.engine == "vllm":
                parts["process"] += VLLM_GIB
    parts["working set"] = max(working)  # models in one pool compute one after the other
    parts["columns"] = _column_bytes(config) / ranks / GIB
    return parts


def _pass_bytes(config: Config, spec: ModelSpec, model: ModelFacts) -> float:
    """Of one forward and backward pass."""
    training, sampling = config.protocol.training, config.algorithm.sampling
    width = config.data.max_prompt_tokens + sampling.max_tokens
    tokens = training.micro_batch * width
    if training.micro_batch_tokens:
        tokens = min(tokens, training.micro_batch_tokens)
    kept = model.layers if spec.optimizer else 1
    activations = tokens * model.hidden * kept * ACTIVATION_BYTES * BYTES[training.dtype]
    responses = tokens * sampling.max_tokens / width
    logits = responses * model.vocab * LOGIT_BYTES if spec.worker in ("actor", "reference") else 0.0
    layer = (model.params - model.embedding) / model.layers
    gathered = model.params if not training.reshard_after_forward else model.embedding + 2 * layer
    gradients = 4 * (model.embedding + layer) if spec.optimizer else 0
    return activations + logits + gathered * BYTES[training.dtype] + gradients


def _column_bytes(config: Config) -> float:
    """Columns of one iteration: token ids of 8 bytes, and eight float32 columns per response token."""
    batch = config.algorithm.batch
    rows = batch.prompts * batch.draws
    return rows * (8 * config.data.max_prompt_tokens + (8 + 32) * config.algorithm.sampling.max_tokens + 256)


def round_up(gib: float) -> float:
    """Two digits, never less."""
    step = 1.0 if gib > 10 else 0.01
    return round((gib // step + 1) * step, 2)
