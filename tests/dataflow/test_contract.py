"""Broken contracts and broken ranks: both values, model, method and rank are named, and the world ends."""

from __future__ import annotations

import os

import pytest

from tests.worlds import run_world

PROGRAMS = "tests.dataflow.programs:"

BREACHES = {
    "swapped ids": [
        "belong to samples [",
        "columns sums",
        "[2, 1, 0, 5, ...]",
        "columns dense",
        "[0, 1, 2, 3, ...]",
        "B.total",
    ],
    "rows": ["returned 2 rows for 3 ids; 3 were expected"],
    "stale weights": ["A.learn", "expected weight version 0, but this rank has 1"],
    "stale column": ["model A, weight version 7", "holds iteration 0, model A, weight version 0"],
    "missing column": ["A.add reads column dense", "it has sums"],
}


@pytest.mark.parametrize("kind", BREACHES)
def test_breach_of_the_contract_on_data(kind: str) -> None:
    result = run_world(4, PROGRAMS + "breach", {"kind": kind})
    assert result.rc != 0
    for text in BREACHES[kind]:
        assert text in result.stderr


FAULTS = {
    "raise": ["rank 2 failed in A.fail", "KeyError: 'no such tensor'"],
    "exit": ["rank 2 died", "A.fail"],
    "kill": ["rank 2 died", "A.fail"],
    "hang": ["rank 2 hangs: A.fail", "time.sleep(3600)"],
    "stop": ["rank 2 has been silent", "A.fail"],
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_failing_rank_is_named_and_nobody_survives(how: str) -> None:
    watchdog = 6.0 if how == "stop" else 3.0  # a stopped rank must have missed several heartbeats by then
    result = run_world(4, PROGRAMS + "fault", {"how": how, "watchdog": watchdog}, timeout=60)
    assert result.rc != 0
    for text in FAULTS[how]:
        assert text in result.stderr
    for each in result.exits:
        assert not os.path.exists(f"/proc/{each.pid}")
