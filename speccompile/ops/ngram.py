"""The n-gram match as ONE op; ``native_`` is the C++ form
(``ops/cpu/csrc/kernels/ngram.cpp``)."""

from __future__ import annotations

import torch

from speccompile.ops.on_cuda import register_on_cuda

_library = torch.library.Library("speccompile", "FRAGMENT")
_SCHEMA = (
    "(Tensor tokens, Tensor length, Tensor slots, int max_ngram, int min_ngram, int draft_len) -> (Tensor, Tensor)"
)


def continue_match(
    tokens: torch.Tensor, length: torch.Tensor, max_ngram: int, min_ngram: int, draft_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue each row's text as it went on after the most recent match of its longest suffix n-gram, around again
    where that reaches the text's end.

    Args:
        tokens: int64 ``[B, S]``; length: int64 ``[B]``.

    Returns:
        Draft tokens int64 ``[B, K]`` and how many of them are valid ``[B]``: all of them, or none.
    """
    capacity = tokens.shape[1]
    places = torch.arange(capacity, device=tokens.device)
    newest = length[:, None] - 1

    # matched[b, i]: how many tokens that end at place i equal the text's newest ones, up to max_ngram.
    matched = torch.zeros_like(tokens)
    equal = places < newest
    for back in range(max_ngram):
        suffix_token = tokens.gather(1, (newest - back).clamp(min=0))
        shifted = torch.roll(tokens, back, dims=1)
        equal = equal & (places >= back) & (newest >= back) & (shifted == suffix_token)
        matched = matched + equal

    # Longest first, then most recent; a key of 0 is no match.
    key = torch.where(matched >= min_ngram, matched * capacity + places, 0).amax(1)
    found = key > 0
    distance = torch.where(found, newest[:, 0] - key % capacity, 1)

    offsets = torch.arange(draft_len, device=tokens.device)
    source = newest + 1 - distance[:, None] + offsets % distance[:, None]
    drafts = tokens.gather(1, source.clamp(min=0, max=capacity - 1))
    return drafts, torch.where(found, draft_len, 0)


def reference(
    tokens: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, max_ngram: int, min_ngram: int, draft_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft tokens int64 ``[B, K]`` and how many of them count ``[B]``: all of them, or none.

    Args:
        tokens: int64 ``[N, S]``; length: int64 ``[N]``; slots: int64 ``[B]``.
    """
    return continue_match(tokens[slots], length[slots], max_ngram, min_ngram, draft_len)


def _on_cuda(*arguments):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.ngram import match

    return match(*arguments)


def _fake(tokens, length, slots, max_ngram, min_ngram, draft_len):  # type: ignore[no-untyped-def]
    return tokens.new_empty((slots.shape[0], draft_len)), tokens.new_empty(slots.shape[0])


for _name in ("match_ngram", "native_match_ngram"):
    _library.define(_name + _SCHEMA)
    torch.library.register_fake(f"speccompile::{_name}", _fake, lib=_library)
_library.impl("match_ngram", reference, "CPU")
register_on_cuda(_library, "match_ngram", _on_cuda)
