"""The n-gram match as ONE op; ``speccompile.modes.ngram`` defines what it finds. ``native_`` is the C++ form
(``lowering/cpu/csrc/kernels/ngram.cpp``)."""

from __future__ import annotations

import torch

from speccompile.lowering.ops.on_cuda import register_on_cuda

_library = torch.library.Library("speccompile", "FRAGMENT")
_SCHEMA = (
    "(Tensor tokens, Tensor length, Tensor slots, int max_ngram, int min_ngram, int draft_len) -> (Tensor, Tensor)"
)


def reference(
    tokens: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, max_ngram: int, min_ngram: int, draft_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft tokens int64 ``[B, K]`` and how many of them count ``[B]``: all of them, or none.

    Args:
        tokens: int64 ``[N, S]``; length: int64 ``[N]``; slots: int64 ``[B]``.
    """
    from speccompile.modes.ngram import NGram

    return NGram(max_ngram, min_ngram).propose(tokens[slots], length[slots], draft_len=draft_len)


def _on_cuda(*arguments):  # type: ignore[no-untyped-def]
    from speccompile.lowering.triton.ngram import match

    return match(*arguments)


def _fake(tokens, length, slots, max_ngram, min_ngram, draft_len):  # type: ignore[no-untyped-def]
    return tokens.new_empty((slots.shape[0], draft_len)), tokens.new_empty(slots.shape[0])


for _name in ("match_ngram", "native_match_ngram"):
    _library.define(_name + _SCHEMA)
    torch.library.register_fake(f"speccompile::{_name}", _fake, lib=_library)
_library.impl("match_ngram", reference, "CPU")
register_on_cuda(_library, "match_ngram", _on_cuda)
