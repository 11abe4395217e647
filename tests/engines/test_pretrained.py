"""Models read shard by shard against the same models made whole by transformers and then split."""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hpcflow.data.columns import Columns
from hpcflow.engines import pretrained, token_model
from hpcflow.engines.fsdp import FSDPEngine
from tests.engines.batches import batch, protocol
from tests.engines.ranks import run_ranks

AUTO = {
    "lm": transformers.AutoModelForCausalLM,
    "value": transformers.AutoModel,
    "score": transformers.AutoModelForSequenceClassification,
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "num_local_experts": 3,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"type": "llama", "tie_word_embeddings": True, "dtype": torch.bfloat16, "shard": "10KB"},
    "untied": {"type": "llama", "tie_word_embeddings": False, "dtype": torch.float32, "shard": "1GB"},
    "rope": {
        "type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "biases": {"type": "qwen2", "tie_word_embeddings": True},
    "scaled embeddings": {"type": "gemma"},
    "other names": {"type": "gpt2", "dtype": torch.float32},
    "experts": {"type": "mixtral"},
    "classifier": {"type": "llama", "head": "score", "num_labels": 1, "shard": "10KB"},
}
"""Kinds of folders: the last but one holds a tensor per expert, which transformers merges."""
TIED = {"tied", "tied by its head", "biases", "scaled embeddings", "other names"}
CASES = [
    ("tied", "lm", True),
    ("tied", "lm", False),
    ("tied", "value", True),
    ("tied by its head", "lm", True),
    ("untied", "lm", True),
    ("untied", "lm", False),
    ("untied", "value", False),
    ("rope", "lm", True),
    ("biases", "lm", True),
    ("scaled embeddings", "lm", True),
    ("other names", "lm", True),
    ("other names", "value", True),
    ("experts", "lm", True),
    ("classifier", "score", False),
    ("own code", "lm", True),
]
HEAD = "lm_head.weight"
OWN_CODE = """
from transformers import LlamaForCausalLM

class OwnForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("kept", self.lm_head.weight.new_zeros(3))
"""


def write_model(folder: Path, type: str, head: str = "lm", **changes: Any) -> None:
    shard = changes.pop("shard", "1GB")
    dtype = changes.pop("dtype", torch.bfloat16)
    config = transformers.AutoConfig.for_model(type, **(SIZES | changes))
    torch.manual_seed(3)
    model = AUTO[head].from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    with token_model.quiet_transformers():
        model.to(dtype).save_pretrained(folder, max_shard_size=shard)


def edit(folder: Path, change: Any) -> None:
    """Let ``change`` alter the tensors of a folder with one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, changes in MODELS.items():
        write_model(root / name, **changes)
    assert len(list((root / "tied").glob("*.safetensors"))) > 3
    write_model(root / "tied by its head", "llama", tie_word_embeddings=True)
    edit(root / "tied by its head", lambda t: t.update({HEAD: t.pop("model.embed_tokens.weight")}))
    write_model(root / "own code", "llama")
    edit(root / "own code", lambda t: t.update(kept=torch.tensor([1.0, 2, 3])))
    edit_config(root / "own code", auto_map={"AutoModelForCausalLM": "own.OwnForCausalLM"})
    (root / "own code" / "own.py").write_text(OWN_CODE)
    return root


def read_whole(path: str, head: str, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """What `token_model.load` gives, with all weights in place; without threads, which a forked process has
    none of."""
    threads_off = mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"})
    with token_model.quiet_transformers(), threads_off:
        hf = AUTO[head].from_pretrained(path, dtype=torch.float32, trust_remote_code=trust_remote_code)
    return hf, SimpleNamespace(read_into=lambda hf: None)


def outputs(engine: FSDPEngine, rows: Columns) -> list:
    run = {"lm": engine.log_probs, "value": engine.values, "score": engine.scores}[engine.model.head]
    return run(rows).tolist()


def tell(path: str, head: str, trainable: bool) -> dict[str, Any]:
    engine = FSDPEngine(
        path, head=head, trainable=trainable, protocol=protocol(dtype="bfloat16"), trust_remote_code=True
    )
    return {
        "digest": engine.weights_digest(),
        "names": list(engine.parameters),
        "dtypes": {str(parameter.dtype) for parameter in engine.parameters.values()},
        "buffers": {name: buffer.tolist() for name, buffer in engine.model.named_buffers()},
        "outputs": outputs(engine, batch(5, dist.get_rank())),
    }


def both_ways(folders: Path, modules: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    told = []
    with mock.patch("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules)):
        for model, head, trainable in CASES:
            case = functools.partial(tell, str(folders / model), head, trainable)
            with mock.patch.object(token_model, "load", read_whole):
                expected = case()
            told.append((case(), expected))
    return told


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_model_read_in_shards_is_the_whole_one(folders: Path, tmp_path: Path, ranks: int) -> None:
    for told in run_ranks(ranks, both_ways, folders, tmp_path):
        for case, (found, expected) in zip(CASES, told, strict=True):
            assert found == expected, case
            model, head, trainable = case
            assert (HEAD in found["names"]) == (head == "lm" and model not in TIED), case
            own = {"torch.float32"} if head == "value" else set()
            assert found["dtypes"] == own | {"torch.float32" if trainable else "torch.bfloat16"}, case


class CountingReader:
    """safe_open's reader that keeps the bytes of every slice that is taken."""

    def __init__(self, path: Path, framework: str) -> None:
        self._reader, self.taken = safe_open(path, framework), []
        READERS.append(self)

    def keys(self) -> list[str]:
        return self._reader.keys()

    def get_slice(self, key: str) -> Any:
        inner = self._reader.get_slice(key)

        class Slice:
            def __getitem__(_, index: Any) -> torch.Tensor:
                piece = inner[index]
                self.taken.append((key, piece.numel() * piece.element_size()))
                return piece

            def get_shape(_) -> list[int]:
                return inner.get_shape()

        return Slice()


READERS: list[CountingReader] = []


def bytes_taken(path: str, head: str) -> tuple[dict[str, int], bool]:
    """Bytes that this rank read of each tensor, and whether parameters had no memory before."""
    with mock.patch.object(pretrained, "safe_open", CountingReader):
        hf, _ = token_model.load(path, head)
        bare = all(parameter.is_meta for parameter in hf.parameters())
        assert not any(reader.taken for reader in READERS)
        FSDPEngine(path, head=head, trainable=True, protocol=protocol())
    taken = [entry for reader in READERS for entry in reader.taken]
    assert len(dict(taken)) == len(taken), "a tensor was read twice"
    return dict(taken), bare


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_rank_reads_only_its_own_rows(folders: Path, ranks: int) -> None:
    files = (folders / "tied").glob("*.safetensors")
    sizes, rows = {}, {}
    for tensors in map(load_file, files):
        sizes |= {key: t.numel() * t.element_size() for key, t in tensors.items()}
        rows |= {key: t.shape[0] for key, t in tensors.items()}
    told = run_ranks(ranks, bytes_taken, str(folders / "tied"), "lm")
    for key, size in sizes.items():
        shares = [taken.get(key, 0) for taken, _ in told]
        assert sum(shares) == size
        assert max(shares) == -(-rows[key] // ranks) * (size // rows[key])
    assert all(bare for _, bare in told)
    assert max(sum(taken.values()) for taken, _ in told) < 1.1 * sum(sizes.values()) / ranks


def refusal(path: str) -> str:
    with pytest.raises(ValueError) as caught:
        FSDPEngine(path, head="lm", trainable=False, protocol=protocol())
    return str(caught.value)


def refusals(root: str) -> dict[str, str]:
    return {folder.name: refusal(str(folder)) for folder in sorted(Path(root).iterdir())}


def test_folders_that_cannot_be_read_are_refused(folders: Path, tmp_path: Path) -> None:
    def copy(model: str, name: str) -> Path:
        return Path(shutil.copytree(folders / model, tmp_path / name))

    (copy("untied", "pickled") / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    (copy("untied", "empty") / "model.safetensors").unlink()
    edit(copy("untied", "lacking"), lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    edit(copy("experts", "expertless"), lambda t: [t.pop(k) for k in list(t) if ".experts." in k])
    edit_config(copy("untied", "other shape"), vocab_size=96)
    edit_config(copy("untied", "not tied"), tie_word_embeddings=True)
    edit_config(copy("untied", "quantised"), quantization_config={"quant_method": "fp8"})
    said = run_ranks(1, refusals, str(tmp_path))[0]
    for name, words in {
        "pickled": "(its *.bin files are pickles, which are not read); write them by AutoModelForCausalLM",
        "empty": "has neither model.safetensors nor model.safetensors.index.json; write",
        "lacking": "has no weights for model.layers.1.mlp.up_proj.weight: it was not saved as",
        "expertless": "has no weights for model.layers.0.mlp.experts.down_proj, ",
        "other shape": "has shape [64, 32], its config.json makes",
        "not tied": "lm_head.weight and model.embed_tokens.weight differ, but its config.json ties them",
        "quantised": "holds quantised weights",
    }.items():
        assert words in said.pop(name)
    assert not said
