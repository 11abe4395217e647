"""Rewards and tools for models that speak no language; the processes that call them start fast: no torch here."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any


def lower_half(prompt: str, response: str, record: dict[str, Any]) -> float:
    """Share of the tokens t0 ... t255 of 512: a random model has 0.5, and can learn 1."""
    numbers = [int(word[1:]) for word in response.split() if word[:1] == "t"]
    return sum(number < 256 for number in numbers) / max(1, len(numbers))


def upper_half(prompt: str, response: str, record: dict[str, Any], text: str = "") -> float:
    """Share of the tokens t256 ... t511: what `lower_half` is not."""
    return 1.0 - lower_half(prompt, response, record)


def echo_tool(prompt: str, response: str, record: dict[str, Any], form: str = "") -> str:
    """Says the response's first word again, to every other response (by its text)."""
    return response.split()[0] if response.split() and sum(map(ord, response)) % 2 else ""


def fails_sometimes(prompt: str, response: str, record: dict[str, Any]) -> float:
    """Fails in one of four ways for about half of the responses, decided by their text."""
    how = sum(map(ord, response)) % 8
    if how == 0:
        raise ValueError("cannot judge this")
    if how == 1:
        time.sleep(3600)
    if how == 2:
        os._exit(11)
    return lower_half(prompt, response, record) if how > 3 else float("nan")


def fails_at_first(prompt: str, response: str, record: dict[str, Any], notes: str) -> float:
    """The first call for about every second response fails in one of three ways, decided by its text."""
    seen = Path(notes) / hashlib.sha256(f"{prompt} {response}".encode()).hexdigest()
    how = sum(map(ord, response)) % 6
    if how < 3 and not seen.exists():
        seen.touch()
        if how == 0:
            raise ConnectionError("the judge is busy")
        if how == 1:
            os._exit(11)
        time.sleep(3600)
    return lower_half(prompt, response, record)
