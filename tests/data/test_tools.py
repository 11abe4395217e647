"""Tools, and texts for language modelling."""

from __future__ import annotations

import pytest

from hpcflow.data.rewards import VerifierPool
from hpcflow.data.texts import TextSet
from hpcflow.data.tools import calculator, template


@pytest.mark.parametrize(
    ("prompt", "response", "said"),
    [
        ("What is 2 + 3?", "I think 2 + 3 * 4 is it", " = 14 "),
        ("What is 20-3?", "Hm.", " = 17 "),
        ("How are you?", "Fine, 7 thanks.", ""),
        ("", "first 1+1, then 10 - 20", " = -10 "),
        ("", "2 ** 99999999 and __import__('os')", ""),
    ],
)
def test_the_calculator_answers_the_last_sum(prompt, response, said):
    assert calculator(prompt, response, {}) == said


def test_a_template_is_filled_in():
    assert template("p", "r", {}, form="{prompt}: {response}?") == "p: r?"


def shout(prompt, response, record):
    if response == "fail":
        raise ValueError("no")
    return response.upper() if response != "number" else 3


def test_a_pool_for_texts():
    samples = [{"prompt": "", "response": word, "record": {}} for word in ("a", "fail", "number", "ä")]
    with VerifierPool("tests.data.test_tools:shout", processes=2, timeout_s=20, returns="text") as pool:
        answers, errors, _ = pool.call(samples)
    assert [answers[0], answers[3]] == ["A", "Ä"] and errors[0] == errors[3] == ""
    assert "ValueError: no" in errors[1] and "not a text" in errors[2]


class Words:
    eos_token_id = 0

    def __call__(self, text):
        return type("Encoded", (), {"input_ids": [len(word) for word in text.split()]})()


def test_texts_end_with_the_end_token_and_are_cut(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "one three fifteen"}\n\n{"text": "a b c d e f"}\n')
    texts = TextSet(str(file), Words(), max_tokens=4)
    assert [texts[i] for i in range(len(texts))] == [[3, 5, 7, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "holds no texts"),
        ('{"text": ""}', ":1: not a JSON object"),
        ('{"text": "a b"}\nnonsense', ":2: not a JSON"),
    ],
)
def test_unusable_texts_are_named(tmp_path, content, why):
    (tmp_path / "texts.jsonl").write_text(content)
    with pytest.raises(ValueError, match=why):
        TextSet(str(tmp_path / "texts.jsonl"), Words(), max_tokens=4)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        TextSet(str(tmp_path / "none.jsonl"), Words(), max_tokens=4)
