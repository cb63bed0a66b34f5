"""Sequences of tokens: a bias on their last token, bad words, and n-grams that were there before. Rows without them
return at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.launch import Launch, run_all
from speccompile.ops.triton.token_lists import of_scores

# Positions of a context that a program reads at once.
PLACES = 1024


@triton.jit
def _token(context, capacity, place):  # type: ignore[no-untyped-def]
    """The token at a place, -2 before the sequence."""
    return tl.load(context + tl.minimum(place, capacity - 1), mask=place >= 0, other=-2)


@triton.jit
def forbid_ngrams(  # type: ignore[no-untyped-def]
    scores, score_row, score_place, vocab, context, capacity, length, sizes, PLACES: tl.constexpr
):
    """Program (place, row): -inf for tokens that would end an n-gram a second time."""
    place, row = tl.program_id(0), tl.program_id(1)
    size = tl.load(sizes + row)
    if size <= 0:
        return
    context += row.to(tl.int64) * capacity
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    end = tl.load(length + row) + place
    lane = tl.arange(0, PLACES)
    for first in range(0, tl.minimum(end, capacity), PLACES):
        last = first + lane
        agrees = (last >= size - 1) & (last < end) & (last < capacity)
        for back in range(1, size):
            before = tl.load(context + last - back, mask=agrees, other=-1)
            agrees = agrees & (before == _token(context, capacity, end - back))
        token = tl.load(context + last, mask=agrees, other=-1)
        tl.store(scores + token, float("-inf"), mask=agrees & (token >= 0) & (token < vocab))


@triton.jit
def forbid_words(  # type: ignore[no-untyped-def]
    scores, score_row, score_place, vocab, context, capacity, length, words, WORDS: tl.constexpr, TOKENS: tl.constexpr
):
    """Program (place, row): -inf for the last token of each word whose other tokens are the latest ones. ``words`` end
    at the last of ``TOKENS``, with -1 before them."""
    place, row = tl.program_id(0), tl.program_id(1)
    context += row.to(tl.int64) * capacity
    end = tl.load(length + row) + place
    words += row.to(tl.int64) * WORDS * TOKENS + tl.arange(0, WORDS) * TOKENS + TOKENS - 1
    last = tl.load(words)
    agrees = (last >= 0) & (last < vocab)
    for back in range(1, TOKENS):
        token = tl.load(words - back)
        agrees = agrees & ((token < 0) | (token == _token(context, capacity, end - back)))
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    tl.store(scores + last, float("-inf"), mask=agrees)


@triton.jit
def bias_sequences(  # type: ignore[no-untyped-def]
    scores,
    score_row,
    score_place,
    vocab,
    context,
    capacity,
    length,
    sequences,
    biases,
    SEQUENCES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (place, row): add the bias of each sequence whose other tokens are the latest ones to the score of its
    last. Biases of one token are added up in the order of the sequences, which are at the front."""
    place, row = tl.program_id(0), tl.program_id(1)
    context += row.to(tl.int64) * capacity
    end = tl.load(length + row) + place
    sequences += row.to(tl.int64) * SEQUENCES * TOKENS + TOKENS - 1
    biases += row.to(tl.int64) * SEQUENCES
    lane = tl.arange(0, SEQUENCES)
    last = tl.load(sequences + lane * TOKENS)
    total = tl.zeros((SEQUENCES,), tl.float32)
    # The first sequence that ends with the same token, whose lane writes.
    first = tl.full((SEQUENCES,), SEQUENCES, tl.int32)
    for index in range(0, tl.sum((last >= 0).to(tl.int32))):
        at = sequences + index * TOKENS
        same = last == tl.load(at)
        first = tl.minimum(first, tl.where(same, index, SEQUENCES))
        agrees = tl.full((), 1, tl.int1)
        for back in range(1, TOKENS):
            token = tl.load(at - back)
            agrees = agrees & ((token < 0) | (token == _token(context, capacity, end - back)))
        total += tl.where(same & agrees, tl.load(biases + index), 0.0)
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    writes = (first == lane) & (last >= 0) & (last < vocab)
    tl.store(scores + last, tl.load(scores + last, mask=writes, other=0.0) + total, mask=writes)


def forbid_repeated(scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, sizes: torch.Tensor) -> None:
    """``no_repeat_ngram_`` on CUDA: ``sizes`` int64 ``[B]``, 0 for none."""
    text = {"context": context.contiguous(), "capacity": context.shape[1], "length": length}
    arguments = {**of_scores(scores), **text, "sizes": sizes, "PLACES": PLACES}
    run_all([Launch(forbid_ngrams, (scores.shape[1], scores.shape[0]), arguments)], scores)


def forbid_bad_words(scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, words: torch.Tensor) -> None:
    """``bad_words_`` on CUDA: ``words`` int64 ``[B, WORDS, TOKENS]``, -1 for none; both sizes are powers of two."""
    text = {"context": context.contiguous(), "capacity": context.shape[1], "length": length}
    sizes = {"WORDS": words.shape[1], "TOKENS": words.shape[2]}
    arguments = {**of_scores(scores), **text, "words": words.contiguous(), **sizes}
    run_all([Launch(forbid_words, (scores.shape[1], scores.shape[0]), arguments)], scores)


def add_sequence_bias(
    scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, sequences: torch.Tensor, biases: torch.Tensor
) -> None:
    """``sequence_bias_`` on CUDA: ``sequences`` int64 ``[B, SEQUENCES, TOKENS]``, -1 for none, and ``biases`` float32
    ``[B, SEQUENCES]``; both sizes are powers of two."""
    text = {"context": context.contiguous(), "capacity": context.shape[1], "length": length}
    own = {"sequences": sequences.contiguous(), "biases": biases.contiguous()}
    sizes = {"SEQUENCES": sequences.shape[1], "TOKENS": sequences.shape[2]}
    arguments = {**of_scores(scores), **text, **own, **sizes}
    run_all([Launch(bias_sequences, (scores.shape[1], scores.shape[0]), arguments)], scores)
