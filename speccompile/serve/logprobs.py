"""Log-probabilities in the shapes of completions and of chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs

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
            token=vocabulary.text_of(token), bytes=list(vocabulary.bytes_of(token)), logprob=max(logprob, -9999.0)
        )

    return [
        ChatCompletionTokenLogprob(
            **shown(entry.token, entry.logprob or 0.0).model_dump(), top_logprobs=[shown(*pair) for pair in entry.top]
        )
        for entry in entries
    ]


@dataclass
class CompletionLogprobs:
    """Log-probabilities of a completion, whose places in the text go on from chunk to chunk.

    Args:
        wanted: how many of the likeliest tokens; the token itself is among them, as one more where it has to be.
    """

    vocabulary: Vocabulary
    wanted: int
    _offset: int = field(default=0, init=False)

    def add(self, entries: Sequence[TokenLogprob]) -> Logprobs:
        """The next tokens' log-probabilities as completions have them; offsets continue those before."""
        texts = [self.vocabulary.text_of(entry.token) for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        logprobs = [entry.logprob for entry in entries]
        tops = [self._top(entry) for entry in entries] if self.wanted else None
        # The first token of a prompt has neither, as in the OpenAI API; its types do not know that.
        return Logprobs.model_construct(tokens=texts, text_offset=offsets, token_logprobs=logprobs, top_logprobs=tops)

    def _top(self, entry: TokenLogprob) -> dict[str, float] | None:
        if entry.logprob is None:
            return None
        pairs = dict(entry.top) | {entry.token: entry.logprob}
        return {self.vocabulary.text_of(token): logprob for token, logprob in pairs.items()}
