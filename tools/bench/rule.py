"""The reward of the iteration benchmark: the share of a response's words that are in the lower half of the
vocabulary.
"""

from __future__ import annotations

VOCABULARY = 512


def share_of_low_words(prompt: str, response: str, record: dict) -> float:
    """Words look like ``t123``; 0 for an empty response."""
    words = [word for word in response.split() if word[1:].isdigit()]
    return sum(int(word[1:]) < VOCABULARY // 2 for word in words) / max(1, len(words))
