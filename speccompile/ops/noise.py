"""Counter-based noise: a function of seed, stream, position and token id.

It has no state, and the order of drawing is irrelevant: a step over eight positions draws what eight steps would draw.
The integers are the same on every machine; Gumbels agree to a few ulp.
"""

from __future__ import annotations

import torch

from speccompile.utils.devices import traits_of

#: Streams. The target and a drafter that draws share ``TOKENS``, keyed by position: that is the rule ``exact``. Every
#: other coin has its own stream.
TOKENS = 0
COINS = 1
RESIDUAL = 2
#: Draws of a drafter whose drafts are judged by coins.
DRAFTS = 3
FORCED = 4

# On a CPU, noise is computed only for the tokens that can be drawn, if these are at most one in FEW.
FEW = 8
#: A seed is one of so many, from 0 on.
SEEDS = 2**63

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
_MASK32 = 0xFFFFFFFF


def _int64(value: int) -> int:
    """The bits of an unsigned constant."""
    return value - 2**64 if value >= 2**63 else value


def _int32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer (Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014)."""
    x = (x ^ _shifted(x, 30, 64)) * _int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27, 64)) * _int64(0x94D049BB133111EB)
    return x ^ _shifted(x, 31, 64)


def _shifted(x: torch.Tensor, by: int, bits: int) -> torch.Tensor:
    """A logical shift to the right; torch's is arithmetic."""
    return (x >> by) & ((1 << (bits - by)) - 1)


def keys(seed: torch.Tensor, stream: int, positions: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
    """64 bits for each place, int64 ``[B, T]``.

    Args:
        seed: int64 ``[B]``; positions: int64 ``[B, T]``, of the token to be chosen.
        start: int64 ``[B]``, committed tokens when the step began. With it, a later step draws other noise at the
            position of a rejected draft. None for ``TOKENS``, whose noise must be the same in every step.
    """
    key = _mix64(seed + _GOLDEN)[:, None]
    key = _mix64(key + (positions + 1) * _GOLDEN)
    key = _mix64(key + _int64(((stream + 1) * _GOLDEN) % 2**64))
    return key if start is None else _mix64(key + (start[:, None] + 1) * _GOLDEN)


def bits(key: torch.Tensor, count: int, first_id: int = 0) -> torch.Tensor:
    """32 bits for each place and each id from ``first_id`` on, int32 ``[B, T, count]``, the same for an id with any
    ``count``.

    Two rounds of Wellons' "lowbias32" around the two halves of the key.
    """
    return bits_of(key[..., None], torch.arange(first_id, first_id + count, dtype=torch.int32, device=key.device))


def bits_of(key: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """:func:`bits` of the given ``ids``, int32; ``key`` and ``ids`` have the shape of the result or expand to it."""
    low, high = (key & _MASK32).to(torch.int32), _shifted(key, 32, 64).to(torch.int32)
    return _mix32(_mix32((ids * _int32(0x9E3779B9)) ^ low).add_(high))


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """In place."""
    x ^= _shifted(x, 16, 32)
    x *= _int32(0x7FEB352D)
    x ^= _shifted(x, 15, 32)
    x *= _int32(0x846CA68B)
    x ^= _shifted(x, 16, 32)
    return x


def uniform(integers: torch.Tensor) -> torch.Tensor:
    """float32 in (0, 1), never 0 and never 1, fine near 0."""
    return ((integers >> 1) & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def gumbel(
    seed: torch.Tensor,
    stream: int,
    positions: torch.Tensor,
    count: int,
    start: torch.Tensor | None = None,
    first_id: int = 0,
) -> torch.Tensor:
    """Standard Gumbels, float32 ``[B, T, count]``: ``argmax(log p + gumbel)`` draws from p.

    Args:
        count, first_id: how many ids, and the first of them.
    """
    return _as_gumbel(bits(keys(seed, stream, positions, start), count, first_id))


def gumbel_of(seed: torch.Tensor, stream: int, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The Gumbel of one id of each place, float32 ``[B, T]``; ids: int64 ``[B, T]``."""
    return _as_gumbel(bits_of(keys(seed, stream, positions), ids.to(torch.int32)))


def _as_gumbel(integers: torch.Tensor) -> torch.Tensor:
    return uniform(integers).neg_().log1p_().neg_().log_().neg_()


def coins(seed: torch.Tensor, stream: int, positions: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """One uniform for each place, float32 ``[B, T]``."""
    return uniform(bits(keys(seed, stream, positions, start), 1))[..., 0]


def add_gumbel(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    positions: torch.Tensor,
    stream: int,
    start: torch.Tensor | None = None,
    first_id: int = 0,
) -> None:
    """Add noise to ``scores`` ``[B, T, V]`` in place, to those of rows with a temperature above 0.

    Args:
        temperature: float32 ``[B]``; seed: int64 ``[B]``; positions, start: as :func:`keys` has them.
        first_id: of the first score.
    """
    draws = temperature > 0
    if traits_of(scores.device).host_memory:
        if not draws.any():
            return
        impossible = scores.isneginf()
        if draws.all() and (impossible.numel() - impossible.sum()) * FEW <= impossible.numel():
            row, place, token = impossible.logical_not_().nonzero(as_tuple=True)
            key = keys(seed, stream, positions, start)[row, place]
            scores[row, place, token] += _as_gumbel(bits_of(key, (token + first_id).to(torch.int32)))
            return
    noise = gumbel(seed, stream, positions, scores.shape[-1], start, first_id)
    scores.add_(torch.where(draws[:, None, None], noise, 0.0))
