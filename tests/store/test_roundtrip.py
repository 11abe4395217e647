"""What is recorded is what is read, bit for bit, with its stamps, summary and lineage."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcflow import store
from hpcflow.data.columns import Ragged, select_rows, text_column
from hpcflow.data.ids import sample_id
from hpcflow.store import schema
from tests.store.runs import assert_same, columns_of, ids_of, write

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit pattern may occur, NaN payloads included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(256, (*shape, width), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def through_file(path, ids, columns):
    facts = {"iteration": 3, "stamps": {name: (3, "m", 0) for name in columns}}
    path.write_bytes(schema.encode(7, facts, ids, columns))
    assert schema.read_index(path) == [(7, 3)]
    with schema.opened(path) as file:
        group = file[schema.group_name(7)]
        assert schema.get_ids(group).equal(ids)
        return {name: schema.get_column(group, name) for name in columns}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 5])
def test_every_type_dense_and_ragged(tmp_path, dtype, rows):
    lengths = torch.tensor([0, 3, 0, 4, 0][:rows], dtype=torch.int64)
    total = int(lengths.sum())
    columns = {
        "dense": random_bits((rows,), dtype, 1),
        "matrix": random_bits((rows, 3), dtype, 2),
        "ragged": Ragged(random_bits((total,), dtype, 3), lengths),
        "ragged matrix": Ragged(random_bits((total, 2), dtype, 4), lengths),
    }
    read = through_file(tmp_path / "x.h5", torch.arange(rows), columns)
    for name, column in columns.items():
        assert_same(column, read[name])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.floats(width=32), max_size=4), max_size=6), st.lists(st.text(), max_size=6))
def test_any_ragged_rows_and_texts(tmp_path_factory, rows, words):
    words = [word.encode(errors="ignore").decode() for word in (words + [""] * len(rows))[: len(rows)]]
    columns = {"x": Ragged.from_lists(rows, torch.float32), "t": text_column(words)}
    read = through_file(tmp_path_factory.mktemp("h") / "x.h5", torch.arange(len(rows)), columns)
    assert_same(columns["x"], read["x"])
    assert_same(columns["t"], read["t"])


def test_views_are_stored_as_they_look(tmp_path):
    dense = torch.arange(12.0).reshape(4, 3).T[1:]
    assert not dense.is_contiguous()
    assert_same(dense, through_file(tmp_path / "x.h5", torch.arange(2), {"x": dense})["x"])


def test_a_type_that_cannot_be_stored_is_named(tmp_path):
    with pytest.raises(ValueError, match="column 'x' is of torch.float8_e5m2fnuz"):
        x = torch.zeros(1, dtype=torch.float8_e5m2fnuz)
        schema.encode(0, {"iteration": 0}, torch.arange(1), {"x": x})


def test_a_fact_that_cannot_be_stored_is_named(tmp_path):
    with store.RunWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match="a fact of type object"):
            writer.commit(0, {"x": object()})
        writer.commit(0, {"x": torch.tensor(2), "y": {"z": torch.arange(2).numpy()}})
    assert store.open(tmp_path).iteration(0).facts["y"] == {"z": [0, 1]}


def test_several_records_align_rows_by_id(tmp_path):
    ids = torch.tensor([40, 10, 30, 20])
    columns = columns_of(0)
    order = torch.tensor([2, 0, 3, 1])
    with store.RunWriter(tmp_path) as writer:
        writer.record(0, ids, {"reward": columns["reward"]}, {"reward": (0, "reward", 0)})
        other = select_rows({"response_ids": columns["response_ids"]}, order)
        writer.record(0, ids[order], other, {"response_ids": (0, "actor", 7)})
        writer.commit(0, {})
    found = store.open(tmp_path).iteration(0)
    assert found.ids.equal(ids)
    assert_same(found.columns["response_ids"], columns["response_ids"])
    assert_same(found.columns["reward"], columns["reward"])
    assert found.stamps == {"reward": (0, "reward", 0), "response_ids": (0, "actor", 7)}


def test_violations_name_both_sides_and_keep_what_was_recorded(tmp_path):
    reward, stamp = {"reward": torch.zeros(4)}, {"reward": (0, "reward", 3)}
    with store.RunWriter(tmp_path) as writer:
        writer.record(0, ids_of(0), reward, stamp)
        twice = r"'reward' recorded twice.*\(0, 'reward', 3\).*\(0, 'reward', 4\)"
        with pytest.raises(ValueError, match=twice):
            writer.record(0, ids_of(0), reward, {"reward": (0, "reward", 4)})
        for other in (ids_of(1), ids_of(0)[:3]):
            with pytest.raises(ValueError, match="other samples.*4 .digest"):
                writer.record(0, other, {"values": torch.zeros(len(other))}, {"values": (0, "critic", 0)})
        with pytest.raises(ValueError, match="2 rows, but 1 sample ids"):
            writer.record(1, torch.tensor([5, 5]), {"reward": torch.zeros(2)}, stamp)
        writer.commit(0, {})
        with pytest.raises(ValueError, match=r"iteration 0 is already committed.*rewind\(0\)"):
            writer.commit(0, {})
    assert list(store.open(tmp_path).iteration(0).columns) == ["reward"]


def test_summary_by_hand(tmp_path):
    columns = {
        "reward": torch.tensor([1.0, 2.0, 6.0, 0.0]),
        "reward_ok": torch.tensor([True, True, True, False]),
        "truncated": torch.tensor([True, False, False, False]),
        "response_ids": Ragged.from_lists([[1, 2], [1], [], [1, 2, 3]], torch.int64),
        "kl": Ragged.from_lists([[0.5, 0.1], [0.3], [], [9.0, 9.0, 9.0]], torch.float32),
        "loss_mask": Ragged.from_lists([[True, False], [True], [], [False] * 3], torch.bool),
    }
    with store.RunWriter(tmp_path) as writer:
        writer.record(0, ids_of(0), columns, {name: (0, "m", 0) for name in columns})
        given = {"actor/loss": math.nan, "kl": 99.0}
        metrics = writer.commit(0, {"tokens": 6, "wall_s": 1.5, "metrics": given})
    assert metrics.pop("actor/loss") is not None
    assert metrics == pytest.approx(
        {
            "reward": 3.0,
            "reward_se": math.sqrt(7.0 / 3),  # variance (4 + 1 + 9) / 2 over 3 samples
            "reward_samples": 3,
            "reward_error_rate": 0.25,
            "truncated_rate": 0.25,
            "response_length": 1.5,
            "kl": 0.4,
            "tokens_per_s": 4.0,
        }
    )
    read = store.open(tmp_path).iteration(0)
    assert math.isnan(read.metrics["actor/loss"]) and read.metrics["kl"] == metrics["kl"]
    assert read.facts["samples"] == 4


@pytest.mark.parametrize(
    "ok, expected",
    [
        ([], {}),
        ([False], {"reward_error_rate": 1.0, "reward_samples": 0}),
        ([True], {"reward_error_rate": 0.0, "reward_samples": 1, "reward": 5.0}),
    ],
)
def test_summary_with_hardly_any_samples(tmp_path, ok, expected):
    columns = {
        "reward": torch.full((len(ok),), 5.0),
        "reward_ok": torch.tensor(ok, dtype=torch.bool),
        "kl": Ragged.from_lists([[]] * len(ok), torch.float32),
    }
    with store.RunWriter(tmp_path) as writer:
        writer.record(0, torch.arange(len(ok)), columns, {name: (0, "m", 0) for name in columns})
        assert writer.commit(0, {}) == expected


def test_nodes_keep_integer_ranks(tmp_path):
    node = {"call": 1, "model": "actor", "method": "update_actor", "ranks": [2, 3], "busy": {2: 0.5, 3: 0.25}}
    with store.RunWriter(tmp_path) as writer:
        writer.commit(0, {"nodes": [node]})
    assert store.open(tmp_path).iteration(0).nodes == [node]


class Tokenizer:
    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


def test_samples_as_plain_values(tmp_path):
    ids = torch.tensor([sample_id(1, 5, 0), sample_id(1, 5, 1)])
    columns = {
        "prompt_ids": Ragged.from_lists([[0, 1], [2]], torch.int64),
        "response_ids": Ragged.from_lists([[], [7, 4]], torch.int64),
        "reward": torch.tensor([0.5, -1.0]),
        "reward_error": text_column(["", "timed out after 2 s"]),
    }
    with store.RunWriter(tmp_path) as writer:
        writer.record(4, ids, columns, {name: (4, "actor", 9) for name in columns})
        writer.commit(4, {})
        write(writer, 5)
    run = store.open(tmp_path)
    assert run.samples(4, Tokenizer())[1] == {
        "iteration": 4,
        "id": int(ids[1]),
        "epoch": 1,
        "prompt_index": 5,
        "draw": 1,
        "generated_by": ("actor", 9),
        "prompt_ids": [2],
        "response_ids": [7, 4],
        "reward": -1.0,
        "reward_error": "timed out after 2 s",
        "prompt": "c",
        "response": "he",
    }
    assert run.samples(4)[0]["response_ids"] == [] and "response" not in run.samples(4)[0]
    assert [sample["iteration"] for sample in run.samples()] == [4, 4, 5, 5, 5, 5]


def test_lineage_both_ways(tmp_path):
    with store.RunWriter(tmp_path) as writer:
        for iteration in range(3):
            write(writer, iteration)
    run = store.open(tmp_path)
    found = run.lineage(6)
    assert (found.iteration, found.generated_by, found.versions) == (1, ("actor", 1), {"actor": 2})
    assert found.made_by["reward"] == (1, "actor", 1)
    assert run.samples_of("actor", 2).tolist() == [8, 9, 10, 11]
    assert run.samples_of("critic", 2).tolist() == [] and run.samples_of("actor", 5).tolist() == []
    with pytest.raises(ValueError, match="sample 12 is in no committed iteration"):
        run.lineage(12)
    with pytest.raises(ValueError, match="iteration 3 is not in .* committed: 0 to 2"):
        run.iteration(3)
    with pytest.raises(KeyError, match="'value'; recorded are response_ids, reward, reward_ok"):
        run.iteration(0).columns["value"]
