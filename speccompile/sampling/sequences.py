"""Sequences of tokens: a bias on their last token, bad words, and n-grams that must not repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from speccompile.graph.state import N, StateSpec
from speccompile.sampling.base import (
    Option,
    Processor,
    bias_problem,
    context_lengths,
    forbid,
    token_problem,
    whole,
)

SEQUENCES = 256
WORDS = 64
#: Most tokens of a word, and of a sequence with a bias.
WORD_TOKENS = 8
LONGEST_NGRAM = 16


def _words_problem(value: Any, vocab: int) -> str | None:
    if not isinstance(value, list | tuple) or not all(isinstance(word, list | tuple) and word for word in value):
        return "it must be a list of lists of token ids"
    if len(value) > WORDS or any(len(word) > WORD_TOKENS for word in value):
        longest = max(len(word) for word in value)
        return f"it has {len(value)} words of up to {longest} tokens; a slot holds {WORDS} of up to {WORD_TOKENS}"
    return next((wrong for word in value for token in word if (wrong := token_problem(token, vocab))), None)


def _biased(value: Any) -> list[tuple[tuple[int, ...], float]] | None:
    """Each sequence and its bias, from either form that transformers accepts; None for any other value."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        return None
    if not all(isinstance(sequence, list | tuple) and sequence for sequence, _ in pairs):
        return None
    # As in transformers, the last bias of a sequence applies.
    return list({tuple(sequence): bias for sequence, bias in pairs}.items())


def _biased_problem(value: Any, vocab: int) -> str | None:
    pairs = _biased(value)
    if pairs is None:
        return "it must be a list of [token ids, bias], or map tuples of token ids to biases"
    longest = max((len(sequence) for sequence, _ in pairs), default=0)
    if len(pairs) > SEQUENCES or longest > WORD_TOKENS:
        return (
            f"it has {len(pairs)} sequences of up to {longest} tokens; a slot holds {SEQUENCES} of up to {WORD_TOKENS}"
        )
    for sequence, bias in pairs:
        if wrong := next((wrong for token in sequence if (wrong := token_problem(token, vocab))), None):
            return wrong
        if wrong := bias_problem(bias):
            return f"the bias {bias!r} of {list(sequence)} {wrong}"
    return None


class SequenceBias(Processor):
    """transformers' ``SequenceBiasLogitsProcessor``: a bias on the last token of a sequence, added to its score where
    the other tokens precede it."""

    name = "sequence_bias"
    options: ClassVar = (Option("sequence_bias", _biased_problem, neutral=[]),)
    #: Each sequence ends in the last column, with -1 before it.
    state: ClassVar = (
        StateSpec("biased_sequences", (N, SEQUENCES, WORD_TOKENS), torch.int64, fill=-1, low=-1, high=2),
        StateSpec("sequence_biases", (N, SEQUENCES), torch.float32),
    )

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        pairs = _biased(values["sequence_bias"]) or []
        # Biases of one token are added up in transformers' order: single tokens, then by the lengths as they come.
        lengths = list(dict.fromkeys([1, *(len(sequence) for sequence, _ in pairs)]))
        pairs.sort(key=lambda pair: lengths.index(len(pair[0])))
        return {
            "biased_sequences": [_ending_last(sequence) for sequence, _ in pairs],
            "sequence_biases": [float(bias) for _, bias in pairs],
        }

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        sequences, values = state
        vocab = scores.shape[-1]
        agrees = _completes(sequences, context, context_lengths(scores, length))
        ends = torch.where(agrees, sequences[:, None, :, -1], vocab)
        bias = scores.new_zeros(*scores.shape[:2], vocab + 1)
        bias.scatter_add_(-1, ends, values[:, None].expand(ends.shape))
        scores.add_(bias[..., :vocab])


class BadWords(Processor):
    """transformers' ``NoBadWordsLogitsProcessor``: the last token of a word is forbidden after the word's others."""

    name = "bad_words"
    options: ClassVar = (Option("bad_words_ids", _words_problem, neutral=[]),)
    #: Each word ends in the last column, with -1 before it.
    state: ClassVar = (StateSpec("bad_words", (N, WORDS, WORD_TOKENS), torch.int64, fill=-1, low=-1, high=2),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"bad_words": [_ending_last(word) for word in values["bad_words_ids"]]}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        (words,) = state
        agrees = _completes(words, context, context_lengths(scores, length))
        forbid(scores, torch.where(agrees, words[:, None, :, -1], -1))


class NoRepeatNgram(Processor):
    """transformers' ``NoRepeatNGramLogitsProcessor``: no n-gram of the sequence, prompt included, repeats."""

    name = "no_repeat_ngram"
    options: ClassVar = (Option("no_repeat_ngram_size", whole(0, LONGEST_NGRAM), neutral=0),)
    state: ClassVar = (StateSpec("no_repeat_ngram", (N,), torch.int64, high=2),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"no_repeat_ngram": values["no_repeat_ngram_size"]}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        size = state[0][:, None, None]
        ends = context_lengths(scores, length)
        places = torch.arange(context.shape[1], device=context.device)
        # An earlier n-gram may end at a position with n - 1 tokens before it, before the new token.
        agrees = (size > 0) & (places >= size - 1) & (places < ends[..., None])
        for back in range(1, LONGEST_NGRAM):
            shifted = torch.nn.functional.pad(context, (back, 0), value=-1)[:, : context.shape[1]]
            same = shifted[:, None] == _token(context, ends - back)[..., None]
            agrees = agrees & ((back >= size) | same)
        forbid(scores, torch.where(agrees, context[:, None].clamp(min=0), -1))


def _ending_last(sequence: Sequence[int]) -> list[int]:
    return [-1] * (WORD_TOKENS - len(sequence)) + list(sequence)


def _completes(sequences: torch.Tensor, context: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Whether all tokens of each sequence except its last precede the positions ``ends`` ``[B, T]``: bool
    ``[B, T, sequences]``.

    Args:
        sequences: int64 ``[B, sequences, WORD_TOKENS]``, -1 before their first tokens, and in unused rows.
    """
    agrees = sequences[:, None, :, -1].expand(-1, ends.shape[1], -1) >= 0
    for back in range(1, WORD_TOKENS):
        token = sequences[:, None, :, -1 - back]
        agrees = agrees & ((token < 0) | (token == _token(context, ends - back)[..., None]))
    return agrees


def _token(context: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The tokens at ``places`` ``[B, T]``, -2 before the sequence."""
    tokens = context.gather(1, places.clamp(0, context.shape[1] - 1))
    return torch.where(places < 0, -2, tokens)
