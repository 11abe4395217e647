"""Padding, micro-batches and weights against loops that pad nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcflow.data.columns import Ragged, select_rows
from hpcflow.engines import batching

LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), max_size=9)


def rows_of(lengths: list[tuple[int, int]]) -> dict:
    """Token ids count up, so that every place has an id of its own."""
    total = iter(range(1, 10_000))
    take = lambda n: [next(total) for _ in range(n)]
    rows = [(take(p), take(r)) for p, r in lengths]
    return {
        "prompt_ids": Ragged.from_lists([p for p, _ in rows], torch.int64),
        "response_ids": Ragged.from_lists([r for _, r in rows], torch.int64),
    }


@given(LENGTHS.filter(bool))
def test_pad_reads_the_place_before_each_response_token(lengths: list[tuple[int, int]]) -> None:
    rows = rows_of(lengths)
    padded = batching.pad(rows)
    flat, width = padded.input_ids.flatten(), padded.input_ids.shape[1]
    assert width == max(p + r for p, r in lengths)
    prompts, responses = rows["prompt_ids"].tolist(), rows["response_ids"].tolist()
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        whole = prompt + response
        assert padded.input_ids[row].tolist() == whole + [0] * (width - len(whole))
        assert flat[padded.last[row]] == whole[-1]
    before = [(p + r)[len(p) - 1 + j] for p, r in zip(prompts, responses, strict=True) for j in range(len(r))]
    assert flat[padded.read].tolist() == before
    assert padded.targets.tolist() == [token for response in responses for token in response]


def test_pad_of_nothing_reads_nothing() -> None:
    padded = batching.pad(rows_of([]))
    assert padded.input_ids.tolist() == [[0]]
    assert padded.read.shape == padded.targets.shape == padded.last.shape == (0,)


def test_an_empty_prompt_is_refused() -> None:
    rows = {
        "prompt_ids": Ragged.from_lists([[1], []], torch.int64),
        "response_ids": Ragged.from_lists([[2], [3]], torch.int64),
    }
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        batching.pad(rows)


@given(LENGTHS, st.integers(1, 4), st.integers(0, 20))
def test_micro_batches_hold_every_row_once_within_their_limits(
    lengths: list[tuple[int, int]], max_rows: int, max_tokens: int
) -> None:
    rows = rows_of(lengths)
    parts = batching.micro_batches(rows, max_rows, max_tokens)
    assert sorted(i for part in parts for i in part.tolist()) == list(range(len(lengths)))
    longest = [max(sum(lengths[i]) for i in part.tolist()) for part in parts]
    assert longest == sorted(longest, reverse=True)
    for part, width in zip(parts, longest, strict=True):
        assert 1 <= len(part) <= max_rows
        assert not max_tokens or len(part) == 1 or len(part) * width <= max_tokens


@given(LENGTHS, st.integers(1, 4))
def test_results_come_back_in_row_order(lengths: list[tuple[int, int]], max_rows: int) -> None:
    rows = rows_of(lengths)
    parts = batching.micro_batches(rows, max_rows)
    values = [batching.pad(select_rows(rows, part)).targets.float() for part in parts]
    column = batching.to_row_order(parts, values, rows["response_ids"].lengths)
    assert column.tolist() == rows["response_ids"].tolist()
    assert torch.equal(column.lengths, rows["response_ids"].lengths)


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=4), min_size=1, max_size=6), st.integers(0, 6))
def test_weights_of_all_parts_sum_to_what_they_promise(mask: list[list[bool]], cut: int) -> None:
    whole = Ragged.from_lists(mask, torch.bool)
    tokens, used, rows = batching.counts(whole)
    assert (tokens, used, rows) == (sum(map(sum, mask)), sum(map(any, mask)), len(mask))
    parts = [whole.rows(0, min(cut, rows)), whole.rows(min(cut, rows), rows)]
    sums = {"token-mean": 1, "seq-mean-token-mean": 1, "seq-mean-token-sum": tokens / max(used, 1)}
    assert sums.keys() == set(batching.AGGREGATIONS)
    for agg, total in sums.items():
        weights = torch.cat([batching.token_weights(part, agg, tokens, used) for part in parts])
        assert weights.sum() == pytest.approx(total if tokens else 0.0)
        assert (weights[~whole.values] == 0).all()


def test_weights_by_hand() -> None:
    mask = Ragged.from_lists([[True, False, True], [], [True]], torch.bool)
    assert batching.token_weights(mask, "token-mean", 6, 4).tolist() == pytest.approx(
        [1 / 6, 0, 1 / 6, 1 / 6]
    )
    per_row = batching.token_weights(mask, "seq-mean-token-mean", 6, 4)
    assert per_row.tolist() == pytest.approx([1 / 8, 0, 1 / 8, 1 / 4])
    per_token = batching.token_weights(mask, "seq-mean-token-sum", 6, 4)
    assert per_token.tolist() == pytest.approx([1 / 4, 0, 1 / 4, 1 / 4])
    with pytest.raises(ValueError, match="agg=mean is not one of token-mean, seq-mean-token-mean"):
        batching.token_weights(mask, "mean", 6, 4)
