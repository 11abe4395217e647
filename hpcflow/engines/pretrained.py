"""Hugging Face folders read part by part: the architecture without memory for its weights, and the weights
straight from the safetensors files into each rank's shards.

No rank holds more than its shards and one slice of a file. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from hpcflow.engines.sharded_state import first_row


def architecture(auto: Any, path: str, trust_remote_code: bool) -> nn.Module:
    """The model that ``auto`` (an Auto class) makes of ``path``: float32 parameters on the meta device,
    buffers with their values on the CPU. ValueError for quantised weights."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None):
        raise ValueError(f"{path} holds quantised weights (quantization_config); a dequantised copy works")
    with _parameters_on_meta():
        return auto.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their memory when a module registers them, before anything is written to it. Buffers
    are computed as ever, because no file holds most of them: torch.device("meta") would lose their values.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with mock.patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


def safetensors_files(path: str) -> list[Path]:
    """model.safetensors, else the files of model.safetensors.index.json. ValueError when there is neither."""
    folder = Path(path)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    pickled = " (its *.bin files are pickles, which are not read)" if list(folder.glob("*.bin")) else ""
    raise ValueError(
        f"{path} has neither {single.name} nor {index.name}{pickled}; write them by "
        "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)"
    )


class Weights:
    """What of the files in ``path`` belongs where in ``hf``, by the names and conversions of transformers.

    hf: as `architecture` made it, not yet sharded. ``missing``: its parameters and persistent buffers that no
    file has; tied ones need one name. ValueError when shapes differ.
    """

    def __init__(self, path: str, hf: nn.Module) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

        self.path = path
        readers = [safe_open(file, "pt") for file in safetensors_files(path)]
        self._readers = {key: reader for reader in readers for key in reader.keys()}  # noqa: SIM118
        state = hf.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        self._names = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
        self._keys: dict[str, list[str]] = {}
        """Name in hf (of tied ones the first) -> the files' names of it."""
        self._made: dict[str, WeightConverter] = {}
        """Name in hf -> how it, and others beside it, are made out of several tensors or of a part of one."""
        transforms = get_model_conversion_mapping(hf)
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        made = set()
        for key in sorted(self._readers, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, hf.base_model_prefix, state)
            if name not in state and key in state:
                name, pattern = key, None
            if name not in state:
                continue
            if pattern is None:
                self._check_shape(key, name, state[name])
                self._keys.setdefault(self._names[name], []).append(key)
                continue
            if name not in self._made:
                self._made[name] = copy.deepcopy(by_pattern[pattern])
            converter = self._made[name]
            converter.add_tensor(name, key, pattern, functools.partial(self._read, key))
            made |= {name.replace(converter.target_patterns[0], each) for each in converter.target_patterns}
        found = self._keys.keys() | {self._names.get(name, name) for name in made}
        self.missing = sorted(set(self._names.values()) - found)

    def _check_shape(self, key: str, name: str, tensor: torch.Tensor) -> None:
        shape = self._readers[key].get_slice(key).get_shape()
        if shape != list(tensor.shape):
            own = list(tensor.shape)
            raise ValueError(f"{self.path}: {key} has shape {shape}, its config.json makes {name} {own}")

    def _read(self, key: str, rows: slice | None = None) -> torch.Tensor:
        return self._readers[key].get_slice(key)[... if rows is None else rows]

    @torch.no_grad()
    def read_into(self, hf: nn.Module) -> None:
        """Fill the model, whose parameters are meanwhile DTensors with memory: each rank reads its own rows,
        which are cast to the parameter's type.

        Tensors that transformers makes out of others (merged experts) are made whole, one at a time, before
        their rows are taken. ValueError when tied parameters differ.
        """
        own = {name: _own_rows(tensor) for name, tensor in (*hf.named_parameters(), *hf.named_buffers())}
        for name, keys in self._keys.items():
            local, rows = own[name]
            if not len(local.shape) or local.shape[0]:
                local.copy_(self._read(keys[0], rows))
                for other in keys[1:]:
                    if not torch.equal(local, self._read(other, rows).to(local)):
                        raise ValueError(
                            f"{self.path}: {keys[0]} and {other} differ, but its config.json ties them; "
                            "tie_word_embeddings=false in it works"
                        )
        for name, converter in self._made.items():
            for target, whole in converter.convert(name, model=hf, config=hf.config).items():
                local, rows = own[self._names[target]]
                local.copy_((whole[0] if isinstance(whole, list) else whole)[... if rows is None else rows])


def _own_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, slice | None]:
    """This rank's part and which rows of the whole it is; a plain tensor and None for what is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor, None
    local, begin = tensor.to_local(), first_row(tensor)
    return local, slice(begin, begin + local.shape[0])
