"""Sample ids and seeds: functions of what a sample is, fixed for ever."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcflow.data.ids import LIMITS, digest, group_key, sample_id, seed_for, unpack

parts = st.tuples(*(st.integers(0, LIMITS[name] - 1) for name in ("epoch", "prompt_index", "draw")))


@given(samples=st.lists(parts, min_size=1))
def test_packing_is_reversible_and_keeps_the_order(samples):
    ids = [sample_id(*sample) for sample in samples]
    assert all(0 <= i < 2**63 for i in ids)
    assert list(zip(*(part.tolist() for part in unpack(torch.tensor(ids))), strict=True)) == samples
    by_id = [sample for _, sample in sorted(zip(ids, samples, strict=True))]
    assert by_id == sorted(samples)


@given(a=parts, b=parts)
def test_a_group_is_one_prompt_of_one_epoch(a, b):
    keys = group_key(torch.tensor([sample_id(*a), sample_id(*b)]))
    assert (keys[0] == keys[1]) == (a[:2] == b[:2])


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("beyond", [-1, None])
def test_parts_out_of_range_are_refused(place, beyond):
    name = list(LIMITS)[place]
    sample = [0, 0, 0]
    sample[place] = LIMITS[name] if beyond is None else beyond
    with pytest.raises(ValueError, match=f"{name}={sample[place]} does not fit"):
        sample_id(*sample)


def test_ids_and_seeds_never_change():
    """Recorded runs hold them: another packing or hash would break replay."""
    assert sample_id(1, 2, 3) == 281474976718851
    assert sample_id(32767, 2**36 - 1, 4095) == 2**63 - 1
    assert seed_for(0, 281474976718851, "actor") == 2613564100056664326
    assert digest(torch.tensor([1, 2, 3])) == "abccad42d03c940bc2b249bf5a4e1e3d"


def test_seeds_differ_in_every_argument():
    seeds = {
        seed_for(run, sample, node, turn)
        for run in range(5) for sample in range(50) for node in ("actor", "eval") for turn in range(3)
    }  # fmt: skip
    assert len(seeds) == 5 * 50 * 2 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_digest_depends_on_order_and_not_on_memory_layout():
    ids = torch.arange(6)
    assert digest(ids) != digest(ids.flip(0))
    assert digest(torch.arange(12)[::2]) == digest(torch.tensor([0, 2, 4, 6, 8, 10]))
