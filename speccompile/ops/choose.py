"""The token of each position, chosen greedily or with noise that is a function of integers: one op for both."""

from __future__ import annotations

import torch

from speccompile.ops import noise
from speccompile.ops.define import define
from speccompile.ops.in_cpp import in_cpp

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


def choose_in_cpp(
    scores: torch.Tensor,
    temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    stream: int = noise.TOKENS,
    start: torch.Tensor | None = None,
    forbids: bool = False,
    first_id: int = 0,
) -> torch.Tensor:
    """Kernel on a CPU, with the result and arguments of :func:`reference`. It calls the C++ op ``choose_nearly``, whose
    logarithms may differ from torch's in their last bits. That op also reports positions where the two best scores are
    so close that this could matter; :func:`reference` chooses there."""
    tokens: torch.Tensor
    tokens, close = torch.ops.speccompile.choose_nearly(
        scores, temperature, seed, positions, stream, start, forbids, first_id
    )
    if temperature is not None and close.any():
        assert seed is not None and positions is not None
        for row, place in close.nonzero().tolist():
            own, at = slice(row, row + 1), slice(place, place + 1)
            began = None if start is None else start[own]
            key = (temperature[own], seed[own], positions[own, at], stream, began)
            tokens[own, at] = reference(scores[own, at], *key, forbids, first_id)
    return tokens


def _fake(scores, *rest, **options):  # type: ignore[no-untyped-def]
    return scores.new_empty(scores.shape[:2], dtype=torch.int64)


define("choose" + SCHEMA, _fake, reference, recorded=True, cuda="choose.choose")
in_cpp("choose", kernel=choose_in_cpp)
