"""Log-probabilities in the formats of completions and of chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs

from speccompile.runtime.detokenizer import Detokenizer
from speccompile.serve.vocabulary import Vocabulary


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token (None for the first of a prompt), and those of the likeliest tokens at its
    position."""

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()


def chat_logprobs(entries: Sequence[TokenLogprob], vocabulary: Vocabulary) -> list[ChatCompletionTokenLogprob]:
    """Log-probabilities in the format of chats."""

    def shown(token: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=vocabulary.text_of(token), bytes=list(vocabulary.bytes_of(token)), logprob=_finite(logprob)
        )

    return [
        ChatCompletionTokenLogprob(
            **shown(entry.token, entry.logprob or 0.0).model_dump(), top_logprobs=[shown(*pair) for pair in entry.top]
        )
        for entry in entries
    ]


class TextOffsets:
    """Offsets of tokens in a text: the number of characters before each. Tokens that belong to one character have the
    same offset.

    Args:
        detokenizer: for these tokens.
        start: number of characters before them.
    """

    def __init__(self, vocabulary: Vocabulary, detokenizer: Detokenizer, start: int) -> None:
        self._vocabulary = vocabulary
        self._detokenizer = detokenizer
        #: Number of characters before the next token, without an incomplete one.
        self.length = start

    def add(self, tokens: Sequence[int]) -> list[int]:
        """Offsets of the next tokens."""
        offsets = []
        for token in tokens:
            piece, own = self._detokenizer.add([token]), self._vocabulary.text_of(token)
            # The piece may begin with an incomplete character of earlier tokens.
            before = len(piece) - len(own) if piece.endswith(own) else 0
            offsets.append(self.length + before)
            self.length += len(piece)
        return offsets


def completion_logprobs(
    entries: Sequence[TokenLogprob], texts: Sequence[str], offsets: Sequence[int], vocabulary: Vocabulary, count: int
) -> Logprobs:
    """Log-probabilities in the format of completions.

    Args:
        texts: texts of the tokens.
        offsets: their offsets in the whole text.
        count: number of likeliest tokens. The token itself is included, as an additional one if necessary.
    """

    def top(entry: TokenLogprob) -> dict[str, float] | None:
        if entry.logprob is None:
            return None
        pairs = dict(entry.top) | {entry.token: entry.logprob}
        return {vocabulary.text_of(token): _finite(logprob) for token, logprob in pairs.items()}

    # The first token of a prompt has no log-probability, as in the OpenAI API, but the types do not allow None.
    return Logprobs.model_construct(
        tokens=list(texts),
        text_offset=list(offsets),
        token_logprobs=[None if entry.logprob is None else _finite(entry.logprob) for entry in entries],
        top_logprobs=[top(entry) for entry in entries] if count else None,
    )


def _finite(logprob: float) -> float:
    """Replace infinity, which JSON lacks, by vLLM's smallest log-probability."""
    return max(logprob, -9999.0)
