"""Transfer protocols and layouts as functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcflow.dataflow import protocols
from hpcflow.mpi.messages import Part, Stamp, Transfer
from hpcflow.reshard.layout import Layout

NAMES = ("ONE_TO_ALL", "3D_PROTO", "3D_ALL_MICRO_DP", "3D_PP_ONLY", "DP_PROTO", "ALL_TO_ALL")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    p_g, t_g, r_p, r_t = (draw(st.sampled_from((1, 2, 3))) for _ in range(4))
    p, t = p_g * r_p, t_g * r_t
    if p * t == 1:
        return Layout(d=draw(st.integers(1, 4)))
    return Layout(d=draw(st.integers(1, 3)), p=p, t=t, p_g=p_g, t_g=t_g)


@given(layouts(), st.sampled_from(NAMES), st.integers(0, 40))
def test_owners_hold_every_row_once_in_order(layout: Layout, name: str, rows: int) -> None:
    """concat(collect(distribute(x))) == x: the property that Table 3's literal micro-DP collect does not have."""
    plan = protocols.plan(protocols.protocol(name), layout, range(10, 10 + layout.ranks), rows)
    held = [row for part in plan.owners for row in range(part.lo, part.hi)]
    assert held == list(range(rows))
    read = {part.rank: (part.lo, part.hi) for part in plan.readers}
    assert all(read[part.rank] == (part.lo, part.hi) for part in plan.owners)
    assert set(read) == set(range(10, 10 + layout.ranks))


@given(layouts(), layouts(), st.sampled_from(NAMES), st.sampled_from(NAMES), st.integers(0, 40))
def test_composed_plans_bring_each_reader_its_rows(
    a: Layout, b: Layout, out: str, into: str, rows: int
) -> None:
    owners = protocols.plan(protocols.protocol(out), a, range(a.ranks), rows).owners
    readers = protocols.plan(protocols.protocol(into), b, range(100, 100 + b.ranks), rows).readers
    transfer = Transfer(1, 1, ("x",), Stamp(0, "a", 0), owners, readers)
    for reader in readers:
        pieces = transfer.pieces(reader.rank)
        assert [r for piece in pieces for r in range(piece.lo, piece.hi)] == list(range(reader.lo, reader.hi))
        assert pieces  # a reader without rows still learns dtypes


def test_generation_groups_of_the_paper() -> None:
    """HybridFlow, figure 8(b): 1-4-2 in training, 1-2-2-2 in generation; and 2-4-1 to 1-2-4-1."""
    layout = Layout(d=2, t=4, t_g=2)
    groups: dict[int, list[int]] = {}
    for rank in range(8):
        groups.setdefault(layout.generation(rank)[2], []).append(rank)
    assert sorted(groups.values()) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    layout = Layout(d=1, p=2, t=4, t_g=2)
    groups = {}
    for rank in range(8):
        groups.setdefault(layout.generation(rank)[2], []).append(rank)
    assert sorted(groups.values()) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_bad_protocols_and_layouts_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="parts \\[1\\] are kept by no rank"):
        protocols.plan(protocols.Protocol("x", lambda _: 2, lambda _, r: (r, r == 0)), Layout(d=2), [1, 2], 4)
    with pytest.raises(ValueError, match="unknown transfer protocol 'DP'; there are 3D_ALL_MICRO_DP"):
        protocols.protocol("DP")
    with pytest.raises(ValueError, match="already"):
        protocols.register("DP_PROTO", lambda _: 1, lambda _, r: (0, True))
    with pytest.raises(ValueError, match="t_g=3, p_g=1 must divide training t=4, p=1"):
        Layout(d=1, t=4, t_g=3)
    with pytest.raises(ValueError, match="p_g\\*t_g=2 does not divide the 3 ranks"):
        Layout(d=3, t_g=2)


def test_a_part_is_as_even_as_possible() -> None:
    assert [protocols.bounds(7, 3, i) for i in range(3)] == [(0, 3), (3, 5), (5, 7)]
    assert [protocols.bounds(1, 3, i) for i in range(3)] == [(0, 1), (1, 1), (1, 1)]
    assert Part(1, 0, 2).hi == 2
