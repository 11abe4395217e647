"""Reference values from other libraries (tests/data_files/peer_oracles.json), as rows of hpcflow."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from hpcflow.data.columns import Columns, Ragged
from hpcflow.data.ids import sample_id

FILE = Path(__file__).parents[1] / "data_files" / "peer_oracles.json"


@functools.cache
def _file() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def tensor(name: str) -> torch.Tensor:
    """An input [6, 12] or [6]."""
    return torch.tensor(_file()["inputs"][name])


def constant(name: str) -> float:
    return _file()["constants"][name]


def output(library: str, case: str) -> Any:
    return _file()["cases"][library][case]["output"]


def names() -> list[str]:
    """ "library/case" of all cases."""
    return [f"{library}/{case}" for library, cases in _file()["cases"].items() for case in cases]


def versions() -> dict[str, str]:
    """The version of each library."""
    return {library: found[library.removesuffix("_ppo")] for library, found in _file()["versions"].items()}


def lengths(mask: str) -> torch.Tensor:
    """int64 [6]: up to the last token of the mask."""
    keep = tensor(mask) > 0
    return torch.where(keep, torch.arange(1, keep.shape[1] + 1), 0).amax(dim=1)


def ragged(values: torch.Tensor, mask: str) -> Ragged:
    return Ragged.from_padded(values, lengths(mask))


def ids(groups: str) -> torch.Tensor:
    """Sample ids [6] whose prompt index is the oracle's group."""
    return torch.tensor([sample_id(0, int(g), draw) for draw, g in enumerate(tensor(groups))])


def rows(mask: str, old: str = "old_logprobs") -> Columns:
    """Every column that an estimator or a loss may read, from the oracle's inputs."""
    names = {
        "old_log_probs": old,
        "ref_log_probs": "ref_logprobs",
        "values": "values",
        "advantages": "advantages",
        "returns": "returns",
    }
    columns: Columns = {name: ragged(tensor(source), mask) for name, source in names.items()}
    columns["loss_mask"] = ragged(tensor(mask) > 0, mask)
    columns["reward"] = tensor("scores")
    columns["cost"], columns["baseline"] = tensor("reward_baselines"), tensor("reward_baselines")
    columns["cost_values"] = ragged(tensor("values_new"), mask)
    for name in ("reward_ok", "cost_ok", "baseline_ok"):
        columns[name] = torch.ones(6, dtype=torch.bool)
    columns["truncated"] = lengths(mask) == 12
    columns["rollout_log_probs"] = ragged(tensor("old_logprobs_wide"), mask)
    return columns
