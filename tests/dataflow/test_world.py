"""Calls, batches and transfers on worlds of real MPI ranks."""

from __future__ import annotations

import pytest

from tests.worlds import NO_SHARED_MEMORY, run_world

PROGRAMS = "tests.dataflow.programs:"
ROWS = [5, 1, 0, 8]

LAYOUTS = [
    ([2, 2], {"d": 2}),
    ([1, 3], {"d": 3}),
    ([3, 1], {"d": 1}),
    ([1, 4], {"d": 1, "p": 2, "t": 2, "p_g": 2}),
    ([2, 4], {"d": 2, "t": 2, "t_g": 2}),
    ([1, 4], {"d": 4, "t_g": 2}),
]


@pytest.mark.parametrize(("sizes", "layout"), LAYOUTS)
def test_every_protocol_round_trips(sizes: list[int], layout: dict[str, int]) -> None:
    """concat(collect(distribute(x))) == x, also for empty parts, ragged rows and bfloat16."""
    result = run_world(
        1 + sum(sizes), PROGRAMS + "round_trips", {"sizes": sizes, "rows": ROWS, "layout": layout}
    ).check()
    assert result.returned[0] == []


MODELS = {"A": "a", "B": "b", "C": "a", "D": "b", "E": "a"}


@pytest.mark.parametrize(
    ("sizes", "env"), [([1, 1], {}), ([2, 3], {}), ([2, 3], NO_SHARED_MEMORY), ([3, 4], {})]
)
def test_random_graphs_never_deadlock(sizes: list[int], env: dict[str, str]) -> None:
    """A thousand asynchronous calls over models that share pools; every value is right at the end."""
    args = {"seed": sum(sizes), "calls": 1000, "sizes": sizes, "models": MODELS}
    assert run_world(1 + sum(sizes), PROGRAMS + "stress", args, env=env).check().returned[0]["wrong"] == 0


def test_controller_bytes_do_not_depend_on_the_batch() -> None:
    args = {"rows": [10, 10, 1000, 100_000]}
    _, small, middle, large = run_world(5, PROGRAMS + "control_bytes", args).check().returned[0]
    assert large[1] > 1000 * small[1]
    assert max(small[0], middle[0], large[0]) - min(small[0], middle[0], large[0]) < 200  # wider integers


def test_only_columns_that_are_read_move() -> None:
    """12 bytes of ``dense`` and 8 bytes of id for each row; tokens, flags and halves stay where they are."""
    assert run_world(5, PROGRAMS + "only_read_columns", {"rows": 1000}).check().returned[0] == [
        20_000,
        20_000,
    ]


def test_columns_nobody_holds_are_freed() -> None:
    result = run_world(5, PROGRAMS + "freed", {"rows": 1000, "turns": 6}).check().returned[0]
    assert result["after"] == 0
    assert max(result["held"][1:]) == min(result["held"][1:]) > 0


def test_the_column_cap_is_named() -> None:
    result = run_world(5, PROGRAMS + "over_cap", {"rows": 1000})
    assert result.rc != 0
    assert "above the cap of 1048576" in result.stderr and "protocol.column_cap_gib" in result.stderr


def test_shared_memory_has_no_name_that_a_killed_world_could_leave() -> None:
    mapped, named = run_world(5, PROGRAMS + "named_shared_memory").check().returned[0]
    assert mapped >= 1 and named == 0


def test_models_in_two_pools_overlap_and_in_one_pool_take_turns() -> None:
    assert run_world(3, PROGRAMS + "overlap", {"seconds": 0.3}).check().returned[0] > 0.15
    assert run_world(2, PROGRAMS + "together", {"seconds": 0.1}).check().returned[0] <= 0


def test_groups_agree_over_their_own_communicators() -> None:
    (a, b) = run_world(5, PROGRAMS + "agreements").check().returned[0]
    assert a == [["x0", "x1x1", "x2x2x2"]] * 3
    assert b is True


def test_a_protocol_of_ones_own() -> None:
    right, owners = run_world(4, PROGRAMS + "own_protocol").check().returned[0]
    assert right
    assert owners == [[1, 0, 4], [3, 4, 7]]


def test_an_idle_world_costs_under_a_tenth_of_a_core() -> None:
    seconds = 4.0
    used = run_world(6, PROGRAMS + "idle", {"seconds": seconds, "workers": 5}).check().returned[0]
    assert used < 0.1 * seconds


def test_batches_over_two_gib() -> None:
    args = {"rows": 3, "width": 3 << 28}
    (found,) = run_world(3, PROGRAMS + "beyond_two_gib", args, timeout=120).check().returned[0]
    assert found == [9 << 28, 0, 1, 1]
