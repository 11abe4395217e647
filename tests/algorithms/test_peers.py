"""Values and gradients of verl, OpenRLHF and TRL, to rounding; every case of the file is compared or has its
reason."""

from __future__ import annotations

import pytest
import torch

from tests.algorithms import oracles, peers


@pytest.mark.parametrize("name", peers.CASES)
def test_values_and_gradients_are_the_peers(name):
    other = peers.expected(name)
    for key, mine in peers.CASES[name]().items():
        torch.testing.assert_close(
            mine.float(), other[key].float(), rtol=1e-6, atol=1e-6, msg=lambda m: f"{key}: {m}"
        )


def test_every_case_is_compared_or_left_out_for_a_reason():
    everything = set(oracles.names())
    assert set(peers.CASES) <= everything
    unexplained = [name for name in everything - set(peers.CASES) if peers.left_out(name) is None]
    assert unexplained == []
    unused = [
        start
        for start in peers.LEFT_OUT
        if not any(n.startswith(start) for n in everything - set(peers.CASES))
    ]
    assert unused == []
