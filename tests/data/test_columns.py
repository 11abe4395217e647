"""Columns: every operation against plain Python lists."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcflow.data.columns import (
    Ragged,
    cat_rows,
    flat,
    n_rows,
    nbytes,
    select_rows,
    slice_rows,
    text_column,
    texts,
)

tables = st.lists(st.lists(st.integers(-(2**60), 2**60), max_size=5), max_size=8)


def columns_of(lists: list[list[int]]) -> dict:
    """A ragged and a dense column that tell rows apart."""
    return {
        "ragged": Ragged.from_lists(lists, torch.int64),
        "dense": torch.arange(len(lists) * 2).view(len(lists), 2),
    }


@given(lists=tables)
def test_round_trip(lists):
    column = Ragged.from_lists(lists, torch.int64)
    assert column.tolist() == lists and len(column) == len(lists)
    assert [row.tolist() for row in column.split()] == lists
    assert nbytes(column) == 8 * sum(map(len, lists)) + 8 * len(lists)
    assert nbytes(torch.zeros(3, 2, dtype=torch.int16)) == 12


@given(lists=tables, data=st.data())
def test_slices_and_their_concatenation(lists, data):
    columns = columns_of(lists)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lists)), max_size=4)))
    bounds = [0, *cuts, len(lists)]
    parts = [slice_rows(columns, lo, hi) for lo, hi in itertools.pairwise(bounds)]
    for (lo, hi), part in zip(itertools.pairwise(bounds), parts, strict=True):
        assert part["ragged"].tolist() == lists[lo:hi]
        assert part["dense"].tolist() == columns["dense"].tolist()[lo:hi]
        assert n_rows(part) == hi - lo
    whole = cat_rows(parts)
    assert whole["ragged"].tolist() == lists and torch.equal(whole["dense"], columns["dense"])


@given(lists=tables.filter(len), data=st.data())
def test_select_in_any_order_with_repeats(lists, data):
    index = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=10))
    picked = select_rows(columns_of(lists), torch.tensor(index, dtype=torch.int64))
    assert picked["ragged"].tolist() == [lists[i] for i in index]
    assert picked["dense"].tolist() == [[2 * i, 2 * i + 1] for i in index]


@given(lists=tables, fill=st.integers(-9, 9), junk=st.integers(0, 2**60))
def test_padding_and_back_whatever_stands_in_the_padding(lists, fill, junk):
    column = Ragged.from_lists(lists, torch.int64)
    padded = column.to_padded(fill)
    width = max(map(len, lists), default=0)
    assert padded.tolist() == [row + [fill] * (width - len(row)) for row in lists]
    spoilt = torch.cat([column.to_padded(junk), torch.full((len(lists), 3), junk)], dim=1)
    assert Ragged.from_padded(spoilt, column.lengths).tolist() == lists


def test_rows_with_more_dimensions():
    column = Ragged(torch.arange(12).view(6, 2), torch.tensor([1, 0, 3, 2]))
    assert column.rows(2, 4).values.tolist() == [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert column.select(torch.tensor([3, 0])).values.tolist() == [[8, 9], [10, 11], [0, 1]]
    assert column.to_padded(0).shape == (4, 3, 2)


def test_slices_are_views():
    column = Ragged.from_lists([[1], [2, 3]], torch.int64)
    column.rows(1, 2).values[0] = 9
    assert column.tolist() == [[1], [9, 3]]


def test_no_rows_keep_their_type():
    empty = Ragged.from_lists([], torch.float32)
    assert empty.values.dtype == torch.float32 and empty.tolist() == [] and empty.split() == ()
    assert empty.select(torch.empty(0, dtype=torch.int64)).values.dtype == torch.float32
    assert flat(empty) is empty.values


@given(lists=st.lists(st.text()))
def test_texts(lists):
    column = text_column(lists)
    assert column.values.dtype == torch.uint8 and texts(column) == lists


def test_lengths_that_do_not_add_up_are_a_programming_error():
    with pytest.raises(AssertionError, match="lengths do not add up"):
        Ragged(torch.zeros(3), torch.tensor([1, 1]))
    with pytest.raises(AssertionError, match="columns of different length: {'a': 1, 'b': 2}"):
        n_rows({"a": torch.zeros(1), "b": torch.zeros(2)})
