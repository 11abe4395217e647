"""Checkpoints against torch.distributed.checkpoint without hpcflow, and between numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from hpcflow.data.columns import select_rows
from hpcflow.engines import sharded_state
from hpcflow.engines.fsdp import FSDPEngine
from tests.engines.batches import OPTIMIZER, batch, protocol, tiny, value_loss
from tests.engines.ranks import run_ranks

RANKS = 3
"""That save: 64 rows are 22, 22 and 20; the value head has one row, so two ranks have nothing of it."""


def make() -> FSDPEngine:
    return FSDPEngine(tiny(), head="value", trainable=True, protocol=protocol(), optimizer=OPTIMIZER)


def digests(engine: FSDPEngine) -> dict[str, str]:
    return {kind: sharded_state.digest(tensors) for kind, tensors in engine._state().items()}


def train_and_save(folder: Path) -> dict[str, Any]:
    engine = make()
    engine.train(select_rows(batch(4), torch.arange(4)), [torch.arange(4)], value_loss)
    engine.save(folder)
    groups = engine._state().items()
    full = {f"{kind}/{name}": t.full_tensor().detach() for kind, ts in groups for name, t in ts.items()}
    return {"digests": digests(engine), "full": full}


def load(folder: Path) -> tuple[dict[str, str], int]:
    engine = make()
    engine.load(folder)
    return digests(engine), engine.version


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoint") / "critic"
    return folder, run_ranks(RANKS, train_and_save, folder)[0]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert tensor.dtype == expected[key].dtype and torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("ranks", [1, 2, RANKS, 5])
def test_any_number_of_ranks_reads_the_same_bits(saved: tuple[Path, dict[str, Any]], ranks: int) -> None:
    folder, told = saved
    assert run_ranks(ranks, load, folder) == [(told["digests"], 1)] * ranks


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_alone_reads_a_checkpoint(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, told = saved
    saved_tensors = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    state = {key: torch.zeros(m.size, dtype=m.properties.dtype) for key, m in saved_tensors.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    assert_equal(state, told["full"])
    assert {key.split("/")[0] for key in state} == {"model", "exp_avg", "exp_avg_sq"}


def test_dcp_makes_whole_tensors_of_a_checkpoint(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, told = saved
    consolidate_safetensors_files(str(folder), str(tmp_path), dict.fromkeys(told["full"], 1))
    assert_equal(load_file(tmp_path / "model-00001-of-00001.safetensors"), told["full"])


def test_rows_that_are_missing_are_named(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, key = saved[0], "exp_avg/layers.0.mlp.up_proj.weight"
    for path in folder.iterdir():
        tensors, metadata = load_file(path), safe_open(path, "pt").metadata()
        if path.name == "00001-of-00003.safetensors":
            del tensors[key]
        save_file(tensors, tmp_path / path.name, metadata)
    assert f"lacks rows of {key}" in run_ranks(1, load_refused, tmp_path)[0]


def load_refused(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        load(folder)
    return str(caught.value)
