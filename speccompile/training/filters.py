"""Filters of texts: duplicates, repetition, and overlap with files that must not be trained on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

#: Number of consecutive words in common by which two texts overlap.
NGRAM = 13
#: A shorter turn of an excluded file must occur as a whole. With fewer words than this it must be the whole user turn.
FEWEST_WORDS = 5

#: Length of a run of tokens; share of distinct runs below which a turn repeats itself; fewest tokens that are judged.
_RUN, _DIFFERENT, _JUDGED = 8, 0.7, 32


def words(text: str) -> list[str]:
    """Words of a text without case, punctuation and white space."""
    return re.findall(r"\w+", text.casefold())


def turn_key(text: str) -> bytes:
    """Key of 16 bytes. It is equal for user turns that differ only in case, punctuation and white space."""
    return hashlib.blake2b(" ".join(words(text)).encode(), digest_size=16).digest()


def repeats(tokens: Sequence[int]) -> bool:
    """Return whether a turn repeats itself: fewer than 70 % of its runs of 8 tokens are distinct."""
    if len(tokens) < _JUDGED:
        return False
    runs = [tuple(tokens[start : start + _RUN]) for start in range(len(tokens) - _RUN + 1)]
    return len(set(runs)) < _DIFFERENT * len(runs)


class Exclusion:
    """Texts that must not occur in training texts.

    A text matches if it has 13 consecutive words of an excluded one, if it contains a whole excluded text of 5 to 12
    words, or if its user turn is an excluded text. Case, punctuation and white space are ignored.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._turns: set[str] = set()
        #: Runs by number of words.
        self._runs: dict[int, set[str]] = {}
        for text in texts:
            found = words(text)
            self._turns.add(" ".join(found))
            length = min(len(found), NGRAM)
            if length >= FEWEST_WORDS:
                self._runs.setdefault(length, set()).update(_runs(found, length))

    def matches(self, user: str, answer: str = "") -> bool:
        """Return whether a user turn, or its answer, overlaps with an excluded text."""
        if " ".join(words(user)) in self._turns:
            return True
        both = [words(user), words(answer)]
        return any(run in known for length, known in self._runs.items() for part in both for run in _runs(part, length))


def _runs(found: list[str], length: int) -> list[str]:
    return [" ".join(found[start : start + length]) for start in range(len(found) - length + 1)]
