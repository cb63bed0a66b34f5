"""Incremental decoding of a sequence's new tokens to text."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
#: Least number of prompt tokens that are decoded with the new ones.
_CONTEXT = 8
#: Most tokens of an incomplete character: it has at most 4 bytes, and each token with a text has at least one.
_MOST_INCOMPLETE = 3
#: Most tokens that may wait for the rest of a character. More of them are bytes that form no character.
_MOST_WAITING = 16


class Detokenizer:
    """Decodes tokens while they arrive. The text continues the prompt's. A decoder that strips the first space of a
    text (SentencePiece) therefore strips the prompt's, but not that of the new text.

    The concatenation of all pieces is the text of the new tokens.

    Args:
        prompt: the tokens before the first new one.
        skip_special_tokens: leave out special tokens; otherwise they appear by their names.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._ids = self._end_of(prompt)
        # Tokens before ``_first`` are not decoded any more. The text of those before ``_second`` has been returned, and
        # ``_returned`` characters after it.
        self._first, self._second, self._returned = 0, len(self._ids), 0

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that is complete with ``tokens``. A character with missing bytes is held back."""
        self._ids += tokens
        text, end = self._text_up_to(len(self._ids)), len(self._ids)
        waits = end - self._second <= _MOST_WAITING
        if not text:
            # Special tokens have no text. The decoder needs the text before them.
            if not waits:
                del self._ids[self._second :]
            return ""
        settled = text
        if text.endswith(_REPLACEMENT):
            end = self._second if waits else self._settled_end(text)
            settled = self._text_up_to(end)
        complete = max(text.rstrip(_REPLACEMENT), settled, key=len)
        piece, self._returned = complete[self._returned :], max(self._returned, len(complete))
        if end > self._second:
            self._returned -= len(settled)
            self._first, self._second = self._second, end
        return piece

    def end(self) -> str:
        """Return the text that was held back."""
        return self._text_up_to(len(self._ids))[self._returned :]

    def _settled_end(self, text: str) -> int:
        """The end of the tokens whose part of ``text`` further tokens do not change. Tokens without a text, such as
        special ones, may stand within a character."""
        with_text = [
            index for index in range(self._second, len(self._ids)) if self._decode(self._ids[index : index + 1])
        ]
        last = with_text[-_MOST_INCOMPLETE] if len(with_text) >= _MOST_INCOMPLETE else self._second
        ends = range(last, self._second, -1)
        return next((end for end in ends if text.startswith(self._text_up_to(end))), self._second)

    def _text_up_to(self, end: int) -> str:
        """Text of the tokens ``[second, end)``."""
        before, text = (self._decode(self._ids[self._first : stop]) for stop in (self._second, end))
        # The new tokens may complete a character of the prompt.
        known = before if text.startswith(before) else before.rstrip(_REPLACEMENT)
        return text[len(known) :]

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Return the last tokens of ``prompt``, from the beginning of a character on. Their text is only empty if that
        of the whole prompt is."""
        size = _CONTEXT
        while True:
            tokens = list(prompt[-size:])
            text = self._decode(tokens)
            if size >= len(prompt) or (text and not text.startswith(_REPLACEMENT)):
                return tokens
            size *= 2

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skips))


def text_of(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text of ``tokens`` after ``prompt``, without special tokens."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return detokenizer.add(tokens) + detokenizer.end()
