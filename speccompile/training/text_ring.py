"""The newest served texts, in memory."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import fields, replace

import torch

from speccompile.runtime.learning import ServedText
from speccompile.training.batches import Batch


class TextRing:
    """Keeps texts until newer ones replace them.

    Args:
        tokens: largest number of tokens to keep. Of a longer text the end is kept.
        judged: number of tokens of the newest texts, which :meth:`newest` returns and :meth:`sample` does not.
    """

    def __init__(self, tokens: int, judged: int) -> None:
        self._most, self._judged = tokens, judged
        self._texts: deque[ServedText] = deque()

    def add(self, text: ServedText) -> None:
        """Add a text. The oldest texts are removed when there are too many tokens."""
        self._texts.append(last_tokens(text, self._most))
        while sum(map(len, self._texts)) > self._most:
            self._texts.popleft()

    def newest(self) -> list[ServedText]:
        """Texts that were never trained on: at least one, unless the ring is empty."""
        return list(self._texts)[self._first_judged() :]

    def sample(self, tokens: int, draws: random.Random) -> list[ServedText]:
        """Draw some of the other texts, of at most ``tokens`` tokens when padded to the longest; may be empty."""
        older = list(self._texts)[: self._first_judged()]
        draws.shuffle(older)
        chosen: list[ServedText] = []
        width = 0
        for whole in older:
            text = last_tokens(whole, tokens)
            width = max(width, len(text))
            if (len(chosen) + 1) * width > tokens:
                break
            chosen.append(text)
        return chosen

    def _first_judged(self) -> int:
        first, tokens = len(self._texts), 0
        while first and (tokens == 0 or tokens + len(self._texts[first - 1]) <= self._judged):
            first -= 1
            tokens += len(self._texts[first])
        return first


def last_tokens(text: ServedText, count: int) -> ServedText:
    """Last tokens of a text. Attention depends only on distances between positions, so a text may begin anywhere."""
    if len(text) <= count:
        return text
    parts = {field.name: getattr(text, field.name) for field in fields(text)}
    return replace(text, **{name: part[-count:] for name, part in parts.items() if part is not None})


def as_batch(texts: Sequence[ServedText]) -> Batch:
    """Batch in the format of :class:`~speccompile.training.batches.Batches`, with hidden states and choices."""
    return {
        field.name: torch.nn.utils.rnn.pad_sequence([getattr(text, field.name) for text in texts], batch_first=True)
        for field in fields(ServedText)
    }
