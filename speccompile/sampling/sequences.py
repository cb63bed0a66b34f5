"""Sequences that must not come: bad words, and n-grams that were there before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from speccompile.graph.state import N, StateSpec
from speccompile.sampling.base import Option, Processor, context_lengths, forbid, token_problem, whole

WORDS = 64
WORD_TOKENS = 8
LONGEST_NGRAM = 16


def _words_problem(value: Any, vocab: int) -> str | None:
    if not isinstance(value, list | tuple) or not all(isinstance(word, list | tuple) and word for word in value):
        return "it has to be a list of lists of token ids"
    if len(value) > WORDS or any(len(word) > WORD_TOKENS for word in value):
        longest = max(len(word) for word in value)
        return f"it has {len(value)} words of up to {longest} tokens; there is room for {WORDS} of up to {WORD_TOKENS}"
    return next((wrong for word in value for token in word if (wrong := token_problem(token, vocab))), None)


class BadWords(Processor):
    """transformers' ``NoBadWordsLogitsProcessor``: the last token of a word must not follow its others."""

    name = "bad_words"
    options: ClassVar = (Option("bad_words_ids", _words_problem, neutral=[]),)
    #: Words end at the last place, with -1 before them.
    state: ClassVar = (StateSpec("bad_words", (N, WORDS, WORD_TOKENS), torch.int64, fill=-1, low=-1, high=2),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"bad_words": [[-1] * (WORD_TOKENS - len(word)) + list(word) for word in values["bad_words_ids"]]}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        (words,) = state
        ends = context_lengths(scores, length)
        agrees = words[:, None, :, -1].expand(-1, scores.shape[1], -1) >= 0
        for back in range(1, WORD_TOKENS):
            word = words[:, None, :, -1 - back]
            agrees = agrees & ((word < 0) | (word == _token(context, ends - back)[..., None]))
        forbid(scores, torch.where(agrees, words[:, None, :, -1], -1))


class NoRepeatNgram(Processor):
    """transformers' ``NoRepeatNGramLogitsProcessor``: no n tokens come twice, prompt included."""

    name = "no_repeat_ngram"
    options: ClassVar = (Option("no_repeat_ngram_size", whole(0, LONGEST_NGRAM), neutral=0),)
    state: ClassVar = (StateSpec("no_repeat_ngram", (N,), torch.int64, high=2),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"no_repeat_ngram": values["no_repeat_ngram_size"]}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        size = state[0][:, None, None]
        ends = context_lengths(scores, length)
        places = torch.arange(context.shape[1], device=context.device)
        # An n-gram may end at a place that has its other tokens before it, and is before the new token.
        agrees = (size > 0) & (places >= size - 1) & (places < ends[..., None])
        for back in range(1, LONGEST_NGRAM):
            shifted = torch.nn.functional.pad(context, (back, 0), value=-1)[:, : context.shape[1]]
            same = shifted[:, None] == _token(context, ends - back)[..., None]
            agrees = agrees & ((back >= size) | same)
        forbid(scores, torch.where(agrees, context[:, None].clamp(min=0), -1))


def _token(context: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The tokens at ``places`` ``[B, T]``, -2 before the sequence."""
    tokens = context.gather(1, places.clamp(0, context.shape[1] - 1))
    return torch.where(places < 0, -2, tokens)
