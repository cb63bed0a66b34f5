"""The token of each position, chosen greedily or with noise that is a function of integers: one op for both."""

from __future__ import annotations

import ctypes

import torch

from speccompile.ops import noise
from speccompile.ops.cpu.library import BASE, when_loaded
from speccompile.ops.define import define

SCHEMA = (
    "(Tensor scores, Tensor? temperature=None, Tensor? seed=None, Tensor? positions=None, int stream=0, "
    "Tensor? start=None, bool forbids=False, int first_id=0) -> Tensor"
)


def reference(
    scores: torch.Tensor,
    temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    stream: int = noise.TOKENS,
    start: torch.Tensor | None = None,
    forbids: bool = False,
    first_id: int = 0,
) -> torch.Tensor:
    """The definition, which the tests hold every kernel against: tokens int64 ``[B, T]``, the first of the greatest.

    Args:
        scores: ``[B, T, V]``, read only.
        temperature: float32 ``[B]``: noise is added to the scores of rows above 0. ``None``: no row gets noise, and
            ``seed`` and ``positions`` are ``None``, too.
        seed, positions, stream, start: arguments of :func:`speccompile.ops.noise.keys`.
        forbids: a token with the score -inf must not be chosen.
        first_id: token id of the first score, for its noise, if the scores are a part of a vocabulary. The returned
            tokens are counted from 0 nevertheless.

    Returns:
        -1 where a score is NaN and, with ``forbids``, where all scores are -inf.
    """
    if temperature is not None:
        assert seed is not None and positions is not None
        scores = scores.to(torch.float32, copy=True)
        noise.add_gumbel(scores, temperature, seed, positions, stream, start, first_id)
    tokens = scores.argmax(-1)
    # A NaN counts as greatest.
    greatest = scores.gather(-1, tokens[..., None])[..., 0]
    none = greatest.isnan() | (greatest == float("-inf")) if forbids else greatest.isnan()
    return torch.where(none, -1, tokens)


@ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_bool,
    *[ctypes.c_int64] * 4,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_bool,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_int64),
)
def _choose_again(address, size, is_bfloat16, vocab, seed, stream, position, start, forbids, first_id, token):  # type: ignore[no-untyped-def]
    """Choose the token of one position by :func:`reference`, and write it to ``token``.

    The logarithms of the C++ kernels may differ from torch's in their last bits. They call this function where the two
    best scores are so close that this could matter. An exception cannot pass through C++, which raises its own where no
    token was written. ctypes prints this one.
    """
    with torch.device("cpu"):
        dtype = torch.float32 if size == 4 else torch.bfloat16 if is_bfloat16 else torch.float16
        scores = torch.frombuffer((ctypes.c_char * (size * vocab)).from_address(address), dtype=dtype)
        began = torch.tensor([start[0]]) if start else None
        key = (torch.ones(1), torch.tensor([seed]), torch.tensor([[position]]), stream, began)
        token[0] = int(reference(scores.view(1, 1, vocab), *key, forbids, first_id))


def _fake(scores, *rest, **options):  # type: ignore[no-untyped-def]
    return scores.new_empty(scores.shape[:2], dtype=torch.int64)


define("choose" + SCHEMA, _fake, reference, cpp=BASE, recorded=True, cuda="choose.choose")
when_loaded(BASE, lambda: ctypes.CDLL(None).speccompile_set_choose_again(_choose_again))
