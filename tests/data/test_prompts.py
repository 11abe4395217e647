"""Prompt sets: positions, permutations, files and what is wrong with them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcflow.data.columns import slice_rows, texts
from hpcflow.data.ids import sample_id, unpack
from hpcflow.data.prompts import PromptSet, permutation
from hpcflow.data.random_llama import parse

PROMPTS = Path(__file__).parents[2] / "configs" / "prompts"


@pytest.fixture(scope="module")
def words():
    return parse("llama?vocab=words").tokenizer()


@pytest.fixture(scope="module")
def chat():
    return parse("llama?vocab=bytes").tokenizer()


def lines(path: Path, *records) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(path)


@pytest.fixture(scope="module")
def seven(words, tmp_path_factory):
    records = [{"prompt": " ".join(f"t{i + 4}" for i in range(n, 2 * n)), "answer": n} for n in range(1, 8)]
    return PromptSet(lines(tmp_path_factory.mktemp("p") / "p.jsonl", *records), words, max_prompt_tokens=7)


def test_records_and_tokens(seven):
    assert len(seven) == 7
    assert seven.record(2) == {"prompt": "t7 t8 t9", "answer": 3}
    assert seven.prompt_ids(2) == [7, 8, 9]


def test_a_span_by_hand(seven):
    """Positions 6 and 7: the last prompt of epoch 0 and the first of epoch 1, two draws each."""
    last, first = int(permutation(5, 0, 7)[6]), int(permutation(5, 1, 7)[0])
    ids, columns = seven.span(seed=5, start=6, count=2, draws=2)
    wanted = [sample_id(0, last, 0), sample_id(0, last, 1), sample_id(1, first, 0), sample_id(1, first, 1)]
    assert ids.tolist() == wanted and ids.dtype == torch.int64
    assert columns["prompt_ids"].tolist() == [seven.prompt_ids(i) for i in (last, last, first, first)]
    assert [json.loads(text) for text in texts(columns["record"])] == [
        seven.record(i) for i in (last, last, first, first)
    ]


@given(
    seed=st.integers(0, 2**31), start=st.integers(0, 40), count=st.integers(0, 20), draws=st.integers(1, 5),
    data=st.data(),
)  # fmt: skip
@settings(deadline=None, max_examples=50)
def test_each_rank_makes_its_rows_of_the_same_span(seven, seed, start, count, draws, data):
    ids, columns = seven.span(seed, start, count, draws)
    assert len(ids) == count * draws and ids.unique().numel() == len(ids)
    lo = data.draw(st.integers(0, len(ids)))
    hi = data.draw(st.integers(lo, len(ids)))
    some, part = seven.span_rows(seed, start, count, draws, lo, hi)
    assert torch.equal(some, ids[lo:hi])
    for name, column in slice_rows(columns, lo, hi).items():
        assert part[name].tolist() == column.tolist()


@given(seed=st.integers(0, 2**31), start=st.integers(0, 20), draws=st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_an_epoch_holds_every_prompt_once(seven, seed, start, draws):
    epoch, prompt, draw = unpack(seven.span(seed, start * 7, 7, draws)[0])
    assert set(epoch.tolist()) == {start}
    assert sorted(prompt[::draws].tolist()) == list(range(7))
    assert draw.tolist() == list(range(draws)) * 7


def test_consecutive_spans_are_one_long_span(seven):
    whole = seven.span(3, 0, 30, 2)[0]
    parts = [seven.span(3, start, count, 2)[0] for start, count in ((0, 4), (4, 11), (15, 15))]
    assert torch.equal(torch.cat(parts), whole)


@given(seed=st.integers(-(2**63), 2**63), epoch=st.integers(0, 2**15), size=st.integers(1, 300))
def test_permutation(seed, epoch, size):
    assert sorted(permutation(seed, epoch, size).tolist()) == list(range(size))


def test_permutations_never_change_and_look_random():
    assert permutation(0, 0, 8).tolist() == [0, 7, 2, 5, 4, 6, 3, 1]
    assert permutation(0, 1, 8).tolist() == [4, 1, 7, 5, 0, 6, 3, 2]
    # where each of 16 prompts lands over many epochs and seeds: uniform within 5 standard deviations
    counts = np.zeros((16, 16))
    for seed in range(40):
        for epoch in range(50):
            counts[np.arange(16), permutation(seed, epoch, 16)] += 1
    expected = 40 * 50 / 16
    assert np.abs(counts - expected).max() < 5 * expected**0.5
    assert (permutation(0, 0, 10_000) != permutation(1, 0, 10_000)).mean() > 0.99


def test_chat_template_and_system_message(chat, tmp_path):
    path = lines(
        tmp_path / "p.jsonl",
        {"prompt": "Hi"},
        {"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"},
                      {"role": "user", "content": "C"}]},
        {"prompt": [{"role": "system", "content": "Own"}, {"role": "user", "content": "D"}]},
    )  # fmt: skip

    def shown(**options) -> list[str]:
        prompts = PromptSet(path, chat, max_prompt_tokens=200, **options)
        return [chat.decode(prompts.prompt_ids(i)) for i in range(3)]

    middle = "<s>user: A</s>\n<s>assistant: B</s>\n<s>user: C</s>\n<s>assistant: "
    own = "<s>system: Own</s>\n<s>user: D</s>\n<s>assistant: "
    assert shown() == ["<s>user: Hi</s>\n<s>assistant: ", middle, own]
    assert shown(system="") == [
        "<s>system: </s>\n<s>user: Hi</s>\n<s>assistant: ",
        "<s>system: </s>\n" + middle,
        own,
    ]
    assert (
        shown(chat=True, system="Be brief.")[0] == "<s>system: Be brief.</s>\n<s>user: Hi</s>\n<s>assistant: "
    )
    plain = PromptSet(path, chat, chat=False, max_prompt_tokens=200)
    assert chat.decode(plain.prompt_ids(0)) == "Hi"
    with pytest.raises(ValueError, match=rf"{path}:2: messages need a chat template"):
        plain.prompt_ids(1)


def test_a_chat_template_that_is_not_there(words, tmp_path):
    with pytest.raises(ValueError, match="data.chat=true, but the model's tokenizer has no chat template"):
        PromptSet(lines(tmp_path / "p.jsonl", {"prompt": "t4"}), words, chat=True, max_prompt_tokens=5)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"question": "t4", "answer": 1}, "no usable prompt; .* this one has the keys question, answer"),
        ({}, r"no usable prompt; .* this one has the keys \(none\)"),
        ({"prompt": 3}, "no usable prompt"),
        ({"prompt": None}, "no usable prompt"),
        ({"messages": []}, "no usable prompt"),
        ({"messages": [{"role": "user"}]}, "no usable prompt"),
        ({"messages": ["hello"]}, "no usable prompt"),
        ({"prompt": ""}, "the prompt has 0 tokens"),
        ({"prompt": "t4 t5 t6 t7"}, "the prompt has 4 tokens; data.max_prompt_tokens=3 allows 1 to 3"),
    ],
)
def test_records_that_cannot_be_used_are_named_by_line(words, tmp_path, bad, message):
    path = lines(tmp_path / "p.jsonl", {"prompt": "t4"}, "", bad)
    prompts = PromptSet(path, words, max_prompt_tokens=3)
    assert prompts.prompt_ids(0) == [4]
    with pytest.raises(ValueError, match=f"{path}:3: {message}"):
        prompts.prompt_ids(1)
    with pytest.raises(ValueError, match=f"{path}:3: {message}"):
        prompts.span(0, 0, 2, 1)


def test_the_last_message_must_not_be_the_assistants(chat, tmp_path):
    path = lines(tmp_path / "p.jsonl", {"messages": [{"role": "assistant", "content": "Hello."}]})
    with pytest.raises(ValueError, match=f"{path}:1: the last message is the assistant's"):
        PromptSet(path, chat, max_prompt_tokens=50).prompt_ids(0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{'prompt': 1}", "not JSON"),
        ('{"prompt": "x"', "not JSON"),
        ("[1, 2]", "a list; each line"),
        ("3", "a int;"),
    ],
)
def test_lines_that_are_no_records(words, tmp_path, bad, message):
    path = lines(tmp_path / "p.jsonl", {"prompt": "t4"}, bad)
    with pytest.raises(ValueError, match=f"{path}:2: {message}"):
        PromptSet(path, words, max_prompt_tokens=3)


def test_files_that_cannot_be_used(words, tmp_path):
    def problem(path: str) -> str:
        with pytest.raises(ValueError) as caught:
            PromptSet(path, words, max_prompt_tokens=3)
        return str(caught.value)

    assert "does not exist" in problem(str(tmp_path / "none.jsonl"))
    assert "does not exist" in problem(str(tmp_path))
    assert "holds no prompts" in problem(lines(tmp_path / "empty.jsonl"))
    assert "must end in .parquet, .jsonl" in problem(lines(tmp_path / "p.csv", "prompt"))
    assert "not a parquet file" in problem(lines(tmp_path / "p.parquet", "prompt"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "binary.jsonl:1: not JSON" in problem(str(tmp_path / "binary.jsonl"))


def test_gzip_and_parquet_hold_the_same(words, tmp_path):
    import pyarrow
    import pyarrow.parquet

    records = [{"prompt": f"t{i}", "answer": {"number": i, "all": [1.5, None]}} for i in range(4, 9)]
    lines(tmp_path / "p.jsonl", *records)
    with gzip.open(tmp_path / "p.jsonl.gz", "wb") as file:
        file.write((tmp_path / "p.jsonl").read_bytes())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "p.parquet")
    spans = []
    for name in ("p.jsonl", "p.jsonl.gz", "p.parquet"):
        prompts = PromptSet(str(tmp_path / name), words, max_prompt_tokens=3)
        assert [prompts.record(i) for i in range(5)] == records
        ids, columns = prompts.span(1, 0, 5, 1)
        spans.append((ids.tolist(), columns["prompt_ids"].tolist(), texts(columns["record"])))
    assert spans[0] == spans[1] == spans[2]


def test_parquet_with_messages_and_columns_that_json_lacks(chat, tmp_path):
    import pyarrow
    import pyarrow.parquet

    messages = [{"role": "user", "content": "Hi"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": messages}]), tmp_path / "m.parquet")
    prompts = PromptSet(str(tmp_path / "m.parquet"), chat, max_prompt_tokens=50)
    assert chat.decode(prompts.prompt_ids(0)) == "<s>user: Hi</s>\n<s>assistant: "
    table = pyarrow.Table.from_pylist([{"prompt": "Hi", "image": b"png"}])
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="b.parquet:0: .*bytes.*columns must be numbers, texts"):
        PromptSet(str(tmp_path / "b.parquet"), chat, max_prompt_tokens=50)


def test_a_reasoning_gym_task(chat):
    path = "reasoning_gym:chain_sum?size=20&seed=1&min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    prompts = PromptSet(path, chat, max_prompt_tokens=200)
    assert len(prompts) == 20
    _, columns = prompts.span(0, 0, 20, 1)
    records = [json.loads(text) for text in texts(columns["record"])]
    assert len({record["prompt"] for record in records}) > 10
    for record in records:
        expression = record["prompt"].rpartition(":")[2].rstrip(" =")
        assert eval(expression) == int(record["answer"])
    with pytest.raises(ValueError, match=r"reasoning_gym:chain_sum\S+:0: the prompt has \d+ tokens"):
        PromptSet(path, chat, max_prompt_tokens=5).prompt_ids(0)


def test_the_products_own_prompts():
    files = [PROMPTS / f"positivity_{part}.jsonl" for part in ("train", "eval")]
    train, held_out = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    assert len(train) == 200 and len(held_out) == 60
    topics = [{record["topic"] for record in part} for part in (train, held_out)]
    assert len(topics[0]) == 40 and len(topics[1]) == 12 and not topics[0] & topics[1]
    assert len({record["prompt"] for record in train + held_out}) == 260
    assert all(record["topic"] in record["prompt"] for record in train + held_out)
