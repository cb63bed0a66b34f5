"""Which texts are dropped: duplicates, endless repetition, and what occurs in files that must not be trained on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

#: Words in a row that make two texts overlap.
NGRAM = 13
#: A shorter turn of an excluded file must occur as a whole; of fewer words than these it must be the user turn.
FEWEST_WORDS = 5

#: Tokens in a row, the share of different ones below which a turn repeats itself, and the fewest tokens judged.
_RUN, _DIFFERENT, _JUDGED = 8, 0.7, 32


def words(text: str) -> list[str]:
    """Its words without case, punctuation and white space."""
    return re.findall(r"\w+", text.casefold())


def turn_key(text: str) -> bytes:
    """Equal for user turns that differ in case, punctuation and white space only; 16 bytes."""
    return hashlib.blake2b(" ".join(words(text)).encode(), digest_size=16).digest()


def repeats(tokens: Sequence[int]) -> bool:
    """Whether a turn repeats itself: fewer than 70 % of its runs of 8 tokens are different ones."""
    if len(tokens) < _JUDGED:
        return False
    runs = [tuple(tokens[start : start + _RUN]) for start in range(len(tokens) - _RUN + 1)]
    return len(set(runs)) < _DIFFERENT * len(runs)


class Exclusion:
    """Texts that must not occur in training texts.

    A text matches if 13 words in a row occur in one of them, if it has a whole one of 5 to 12 words in a row, or if its
    user turn is one of them. Case, punctuation and white space do not count.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._turns: set[str] = set()
        #: By number of words.
        self._runs: dict[int, set[str]] = {}
        for text in texts:
            found = words(text)
            self._turns.add(" ".join(found))
            length = min(len(found), NGRAM)
            if length >= FEWEST_WORDS:
                self._runs.setdefault(length, set()).update(_runs(found, length))

    def matches(self, user: str, answer: str = "") -> bool:
        """Whether a user turn, or its answer, overlaps with one of the texts."""
        if " ".join(words(user)) in self._turns:
            return True
        both = [words(user), words(answer)]
        return any(run in known for length, known in self._runs.items() for part in both for run in _runs(part, length))


def _runs(found: list[str], length: int) -> list[str]:
    return [" ".join(found[start : start + length]) for start in range(len(found) - length + 1)]
