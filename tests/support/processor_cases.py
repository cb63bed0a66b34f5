"""Random state of the sampling processors, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from speccompile.sampling.allowed import as_words, packed

VOCAB = 70
WORD_TOKENS = 4
#: ``(below, *shape)`` to int64 in ``[0, below)``.
Numbers = Callable[..., torch.Tensor]


def integers_from(seed: int) -> Numbers:
    generator = torch.Generator().manual_seed(seed)
    return lambda below, *shape: torch.randint(below, shape, generator=generator)


def lists(integers: Numbers, rows: int, size: int) -> torch.Tensor:
    """Different ids in each row, fewer than ``size`` of them in most, none in some."""
    ids = torch.argsort(integers(10**6, rows, VOCAB), 1)[:, :size]
    return torch.where(torch.arange(size) < integers(size + 1, rows, 1), ids, -1)


def one_of(integers: Numbers, rows: int, *values: float) -> torch.Tensor:
    return torch.tensor(values)[integers(len(values), rows)]


def bits(integers: Numbers, rows: int) -> torch.Tensor:
    """Masks of all tokens at four positions."""
    masks = integers(2, rows, 4, VOCAB).bool()
    return torch.stack([as_words([packed(mask.numpy()) for mask in of_row]) for of_row in masks])


STATE: dict[str, Callable[[Numbers, int], list[torch.Tensor]]] = {
    "temperature": lambda integers, rows: [one_of(integers, rows, 0.0, 1.0, 0.7, 1.3)],
    "logit_bias": lambda integers, rows: [lists(integers, rows, 5), integers(9, rows, 5) - 4.25],
    "cutoffs": lambda integers, rows: [one_of(integers, rows, 0.0, 0.0123), one_of(integers, rows, 0.0, 0.0456, 0.9)],
    "remove_invalid_values": lambda integers, rows: [integers(2, rows).bool()],
    "suppress_tokens": lambda integers, rows: [lists(integers, rows, 5)],
    "begin_suppress_tokens": lambda integers, rows: [lists(integers, rows, 5), 10 + integers(8, rows)],
    "min_new_tokens": lambda integers, rows: [10 + integers(8, rows), lists(integers, rows, 3)],
    "forced_eos": lambda integers, rows: [lists(integers, rows, 3), 10 + integers(8, rows)],
    "allowed_tokens": lambda integers, rows: [integers(2, rows).bool(), bits(integers, rows)],
    "repetition_penalty": lambda integers, rows: [one_of(integers, rows, 1.0, 1.3, 0.7)],
    "presence_penalty": lambda integers, rows: [one_of(integers, rows, 0.0, 1.3, -0.7), integers(12, rows)],
    "frequency_penalty": lambda integers, rows: [one_of(integers, rows, 0.0, 1.3, -0.7), integers(12, rows)],
    "no_repeat_ngram": lambda integers, rows: [integers(4, rows)],
}


def words(integers: Numbers, rows: int) -> list[torch.Tensor]:
    """Eight words of at most ``WORD_TOKENS`` tokens each, of the four tokens that texts have."""
    found, sizes = integers(4, rows, 8, WORD_TOKENS), integers(WORD_TOKENS + 1, rows, 8, 1)
    return [torch.where(torch.arange(WORD_TOKENS - 1, -1, -1) < sizes, found, -1)]


def biased_words(integers: Numbers, rows: int) -> list[torch.Tensor]:
    """Those that are none stand after the others; several of these end with one token."""
    found, biases = words(integers, rows)[0], (integers(90, rows, 8) - 45) * 0.1
    order = (found[..., -1] < 0).int().argsort(stable=True, dim=1)
    return [found.gather(1, order[..., None].expand_as(found)), biases]


#: Of processors that read words of at most ``WORD_TOKENS`` tokens, to which tests set the constant of this name.
STATE_OF_WORDS: dict[str, Callable[[Numbers, int], list[torch.Tensor]]] = {
    "bad_words": words,
    "sequence_bias": biased_words,
}
