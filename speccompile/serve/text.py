"""The text of tokens that arrive a few at a time, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"


class Decoder:
    """Decodes tokens as they arrive. All pieces together are the text of all tokens.

    Args:
        skip_special: leave out special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        # Tokens before the first are not decoded any more; the text of those up to the second has been returned.
        self._first, self._second = 0, 0

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is complete with ``tokens``. A character whose bytes are not all there yet is kept back."""
        self._ids += tokens
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._first, self._second = self._second, len(self._ids)
        return text

    def end(self) -> str:
        """What was kept back."""
        return self._new_text()

    def _new_text(self) -> str:
        before = self._decode(self._ids[self._first : self._second])
        return self._decode(self._ids[self._first :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special))


class StopFilter:
    """Ends a text before the one of ``stops`` that is complete first, and holds back what may become one. The result
    does not depend on the pieces in which the text arrives."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._kept = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """What may be shown once ``piece`` has arrived; nothing after a stop."""
        if self.stopped:
            return ""
        text = self._kept + piece
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._kept = True, ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """What was kept back: no stop came of it."""
        kept, self._kept = self._kept, ""
        return kept


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class StopTexts:
    """A stopping criterion: the new text contains one of ``stops``. Unlike transformers' it does not match in the
    prompt, and does not walk over the vocabulary for each new stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], *, skip_special: bool = True) -> None:
        self._decoder, self._filter = Decoder(tokenizer, skip_special=skip_special), StopFilter(stops)

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        """``ids`` ``[1, P + new]``; called once for each new token."""
        self._filter.add(self._decoder.add([int(ids[0, -1])]))
        return self._filter.stopped
