"""Reward functions that need no model, and the tasks that come with one of them.

A reward function is called as ``f(prompt, response, record, **args) -> float`` in a process of
`hpcflow.data.rewards.VerifierPool`; an attribute ``prepare`` (called as ``f.prepare(**args)``) is run once
when such a process starts, outside the time limit of a call. Libraries are imported when first used.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import json
from typing import Any
from urllib.parse import unquote

SCHEME = "reasoning_gym:"
DEFAULTS = {"size": 1000, "seed": 0}


def vader_sentiment(prompt: str, response: str, record: dict[str, Any]) -> float:
    """How positive the response sounds: VADER's compound score, in [-1, 1] (Hutto and Gilbert 2014)."""
    return _vader().polarity_scores(response)["compound"]


def contains(prompt: str, response: str, record: dict[str, Any], *, text: str) -> float:
    """1 if ``text`` stands in the response, else 0."""
    return float(text in response)


def reasoning_gym(prompt: str, response: str, record: dict[str, Any]) -> float:
    """The task's own score of the response, in [0, 1]; for records made by `ReasoningGymRecords`."""
    source = record.get("reasoning_gym")
    if source is None:
        raise ValueError(
            'the record has no "reasoning_gym"; prompts must come from data.train=reasoning_gym:<task>'
        )
    # the entry is made again, not recorded: JSON turns tuples into lists, which some tasks score wrongly
    dataset = _dataset(source["task"], json.dumps(source["settings"], sort_keys=True))
    return dataset.score_answer(response.strip(), dataset[source["index"]])


@functools.cache
def _vader() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def _import_reasoning_gym() -> None:
    import reasoning_gym  # noqa: F401


vader_sentiment.prepare = _vader
reasoning_gym.prepare = _import_reasoning_gym


class ReasoningGymRecords:
    """The entries of a reasoning-gym task as prompt records, made when asked for.

    path: ``reasoning_gym:<task>?size=1000&seed=1&min_terms=2``, settings as the task's configuration names
    them. A record holds "prompt", "answer" and "reasoning_gym" (task, index, settings: what the verifier
    needs). ValueError names an unknown task, an unknown setting or a value that the task refuses.
    """

    def __init__(self, path: str) -> None:
        self.task, _, query = path.removeprefix(SCHEME).partition("?")
        given = (setting.partition("=") for setting in query.split("&") if setting)
        self.settings = DEFAULTS | {name: _literal(unquote(value)) for name, _, value in given}
        try:
            self.dataset = _dataset(self.task, json.dumps(self.settings, sort_keys=True))
        except AssertionError as error:  # how the tasks' configurations refuse values
            raise ValueError(f"{path}: {error}") from error

    def __len__(self) -> int:
        return self.settings["size"]

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = self.dataset[index]
        source = {"task": self.task, "index": index, "settings": self.settings}
        return {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": source}


@functools.lru_cache(maxsize=8)
def _dataset(task: str, settings: str) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, 3) or sorted(DATASETS)[:8]
        raise ValueError(f"{SCHEME}{task}: there is no such task; near it: {', '.join(near)}")
    chosen = json.loads(settings)
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(f"{SCHEME}{task} has no setting {', '.join(unknown)}; it has {', '.join(known)}")
    return create_dataset(task, **chosen)


def _literal(text: str) -> Any:
    """true, false, null, numbers, lists; anything else is a text."""
    names = {"true": True, "false": False, "null": None}
    if text in names:
        return names[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
