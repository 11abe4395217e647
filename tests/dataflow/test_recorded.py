"""Recorded columns in place of calls: which calls are made, which are not, which later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpcflow.dataflow.batch import Batch
from hpcflow.dataflow.recorded import Recorded
from hpcflow.workers.primitive import Primitive

PLACES = {"tokens": "m.generate#1", "mask": "m.advantage#1", "gain": "m.advantage#1"}
GENERATE = Primitive("generate", "DP_PROTO", (), ("tokens", "mask"), "replayable")
ADVANTAGE = Primitive("advantage", "DP_PROTO", ("tokens",), ("gain", "mask"), "pure")
UPDATE = Primitive("update", "DP_PROTO", ("gain",), (), "advancing")
COUNT = Primitive("count", "DP_PROTO", ("tokens",), (), "replayable")


class FakeOrigin:
    def now(self, name: str) -> FakeOrigin:
        return self


class FakeGroup:
    """Stands for the recorder and for a model."""

    primitives = {"replay": Primitive("replay", "ONE_TO_ALL", (), (), "pure")}
    ranks = (2, 3)
    world = SimpleNamespace(controller=None)
    version = 4

    def issue(self, primitive: Primitive, *_: Any) -> Batch:
        return Batch(None, 8, {name: FakeOrigin() for name in primitive.writes})


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup()


@pytest.fixture
def made() -> list[Batch]:
    """The calls that were made."""
    return []


def ask(
    recorded: Recorded, group: FakeGroup, primitive: Primitive, place: str, made: list, rows: int = 8
) -> Any:
    def make() -> Batch:
        made.append(group.issue(primitive))
        return made[-1]

    return recorded.instead_of(group, primitive, None, rows, place, make)


def test_recorded_columns_take_the_place_of_their_call(group, made) -> None:
    recorded = Recorded(group, 5, 8, PLACES, {})
    batch = ask(recorded, group, ADVANTAGE, "m.advantage#1", made)
    assert {name: batch.columns[name] is recorded.columns[name] for name in ("gain", "mask")} == {
        "gain": True, "mask": True
    }  # fmt: skip
    assert recorded.skipped == ["m.advantage#1"] and made == []


def test_a_column_that_another_call_replaced_is_made_only_when_it_is_read(group, made) -> None:
    recorded = Recorded(group, 5, 8, PLACES, {})
    batch = ask(recorded, group, GENERATE, "m.generate#1", made)
    assert batch.columns["tokens"] is recorded.columns["tokens"]
    later = batch.columns["mask"]
    assert later.peek("mask") is later and made == [] and recorded.skipped == []
    origin = later.now("mask")
    assert origin is made[0].columns["mask"] and later.peek("mask") is origin
    assert later.now("tokens") is made[0].columns["tokens"] and len(made) == 1


@pytest.mark.parametrize(("place", "rows"), [("m.generate#2", 8), ("m.generate#1", 9)])
def test_another_call_of_the_node_or_other_rows_are_not_taken_for_it(group, made, place, rows) -> None:
    recorded = Recorded(group, 5, 8, PLACES, {})
    batch = ask(recorded, group, GENERATE, place, made, rows)
    assert batch.columns["tokens"] is not recorded.columns["tokens"]
    assert batch.columns["tokens"].now("tokens") is made[0].columns["tokens"]


def test_what_is_made_later_must_be_the_same_call(group, made) -> None:
    batch = ask(Recorded(group, 5, 8, PLACES, {}), group, GENERATE, "m.generate#1", made)
    group.version = 5  # an update came in between
    group.name = "m"
    with pytest.raises(RuntimeError, match="m.generate#1 .* weight version 4; .* has version 5 now"):
        batch.columns["mask"].now("mask")
    assert made == []


def test_updates_are_always_made_and_values_are_known_or_made(group, made) -> None:
    recorded = Recorded(group, 5, 8, PLACES, {"m.count#1": {2: 7, 3: 9}})
    assert ask(recorded, group, UPDATE, "m.update#1", made) is None
    assert ask(recorded, group, COUNT, "m.count#2", made) is None
    handle = ask(recorded, group, COUNT, "m.count#1", made)
    assert handle.wait().get() == [7, 9]
    assert made == [] and recorded.skipped == ["m.count#1"]
