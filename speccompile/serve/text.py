"""Text of an answer while its tokens arrive, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from speccompile.runtime.detokenizer import Detokenizer


class StopFilter:
    """Ends a text before the first complete one of ``stops``, and holds back text that may become one. The result does
    not depend on how the text is divided into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._kept = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """Return the text that may be shown after ``piece`` has arrived; empty after a stop string."""
        if self.stopped:
            return ""
        text, old = self._kept + piece, len(self._kept)
        # A stop string must end in the new piece. Those that end in the held-back text were checked, or do not count.
        starts = [(text.find(stop, max(0, old - len(stop) + 1)), len(stop)) for stop in self._stops]
        found = [(start + length, start) for start, length in starts if start >= 0]
        if found:
            self.stopped, self._kept = True, ""
            return text[: min(found)[1]]
        return self._keep_back(text)

    def add_unchecked(self, piece: str) -> str:
        """Return the text that may be shown, without a check for a stop string that ends in ``piece``."""
        return self._keep_back(self._kept + piece)

    def _keep_back(self, text: str) -> str:
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """Return the text that was held back."""
        kept, self._kept = self._kept, ""
        return kept


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class AnswerText:
    """Text of an answer's tokens, up to a stop string. It does not depend on the steps in which they arrive.

    Args:
        prompt: tokens before the answer.
        stops: stop strings. The text ends before the one that is complete first.
        min_tokens: no stop string ends in the text of the first ``min_tokens`` tokens, as in vLLM.
        skip_special_tokens: whether to leave out special tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stops: Sequence[str],
        min_tokens: int = 0,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        self._filter = StopFilter(stops)
        self._unchecked = min_tokens

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._filter.stopped

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that may be shown after ``tokens`` have arrived."""
        first, rest = tokens[: self._unchecked], tokens[self._unchecked :]
        self._unchecked -= len(first)
        shown = self._filter.add_unchecked(self._detokenizer.add(first)) if first else ""
        return shown + self._filter.add(self._detokenizer.add(rest))

    def end(self) -> str:
        """Return the text that was held back."""
        return self._filter.add(self._detokenizer.end()) + self._filter.end()


class StopTexts:
    """Stopping criterion: one of the stop strings of ``text`` is complete. Unlike transformers' criterion it does not
    match in the prompt, and does not scan the vocabulary for each new stop string."""

    def __init__(self, text: AnswerText) -> None:
        self._text = text

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        """Evaluate the criterion for ``ids`` ``[1, P + new]``. It must be called once for each new token."""
        self._text.add([int(ids[0, -1])])
        return self._text.stopped
