"""Log-probabilities in the shapes of completions and of chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs

from speccompile.runtime.detokenizer import Detokenizer
from speccompile.serve.vocabulary import Vocabulary


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability, None for the first one of a prompt, and those of the likeliest tokens in its place."""

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()


def chat_logprobs(entries: Sequence[TokenLogprob], vocabulary: Vocabulary) -> list[ChatCompletionTokenLogprob]:
    """Log-probabilities as chats have them."""

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
    """Offsets of tokens in a text: the number of characters before each. Tokens that are parts of one character have
    the same offset.

    Args:
        detokenizer: of these tokens.
        start: characters before them.
    """

    def __init__(self, vocabulary: Vocabulary, detokenizer: Detokenizer, start: int) -> None:
        self._vocabulary = vocabulary
        self._detokenizer = detokenizer
        self._length = start

    def add(self, tokens: Sequence[int]) -> list[int]:
        """Of the next tokens."""
        offsets = []
        for token in tokens:
            piece, own = self._detokenizer.add([token]), self._vocabulary.text_of(token)
            # Bytes of no character before the token come with it.
            before = len(piece) - len(own) if piece.endswith(own) else 0
            offsets.append(self._length + before)
            self._length += len(piece)
        return offsets


def completion_logprobs(
    entries: Sequence[TokenLogprob], offsets: Sequence[int], vocabulary: Vocabulary, wanted: int
) -> Logprobs:
    """Log-probabilities as completions have them.

    Args:
        offsets: the tokens' places in the text.
        wanted: how many of the likeliest tokens; the token itself is among them, as one more if necessary.
    """

    def top(entry: TokenLogprob) -> dict[str, float] | None:
        if entry.logprob is None:
            return None
        pairs = dict(entry.top) | {entry.token: entry.logprob}
        return {vocabulary.text_of(token): _finite(logprob) for token, logprob in pairs.items()}

    # The first token of a prompt has neither, as in the OpenAI API; its types do not know that.
    return Logprobs.model_construct(
        tokens=[vocabulary.text_of(entry.token) for entry in entries],
        text_offset=list(offsets),
        token_logprobs=[None if entry.logprob is None else _finite(entry.logprob) for entry in entries],
        top_logprobs=[top(entry) for entry in entries] if wanted else None,
    )


def _finite(logprob: float) -> float:
    """JSON has no infinity: vLLM's smallest log-probability."""
    return max(logprob, -9999.0)
