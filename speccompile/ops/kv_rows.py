"""Keys and values as a cache stores them: in a float dtype, or in 8 bits."""

from __future__ import annotations

import torch

from speccompile.ops.define import define

#: Features of a head that share a scale, as in llama.cpp's ``q8_0``.
GROUP = 32
#: Bytes of a scale, float16.
_SCALE = 2
#: The greatest number that a feature is rounded to.
_MOST = 127


def is_rounded_to_8_bits(cache: torch.Tensor) -> bool:
    """Whether the rows of ``cache`` ``[..., size]`` are those of :func:`round_kv`."""
    return cache.dtype is torch.int8


def row_size(features: int, dtype: torch.dtype) -> int:
    """The number of elements of a cache of ``dtype`` that hold one head's ``features``."""
    return features + _SCALE * -(-features // GROUP) if dtype is torch.int8 else features


def features_of(cache: torch.Tensor) -> int:
    """The number of features that the last dimension of ``cache`` holds."""
    size = cache.shape[-1]
    return size - _SCALE * -(-size // (GROUP + _SCALE)) if is_rounded_to_8_bits(cache) else size


def spacing(dtype: torch.dtype) -> float:
    """The change of a feature, as a share of the largest one beside it, if it is rounded the other way."""
    return 1 / _MOST if dtype is torch.int8 else torch.finfo(dtype).eps


def to_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values ``[..., D]`` as a cache of ``dtype`` stores them."""
    rounded: torch.Tensor = torch.ops.speccompile.round_kv(x) if dtype is torch.int8 else x.to(dtype)
    return rounded


def from_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values ``[..., D]`` in ``dtype``, from the rows of a cache."""
    widened: torch.Tensor = torch.ops.speccompile.widen_kv(rows) if is_rounded_to_8_bits(rows) else rows
    return widened.to(dtype)


def has_nan(rows: torch.Tensor) -> bool:
    """Whether a key or a value in ``rows`` is not a number."""
    return bool((_scales(rows) if is_rounded_to_8_bits(rows) else rows).isnan().any())


def round_kv(x: torch.Tensor) -> torch.Tensor:
    """Round each feature to 8 bits.

    Args:
        x: ``[..., D]``.

    Returns:
        int8 ``[..., D + 2 * ceil(D / 32)]``: for each feature the nearest integer to its quotient by the scale of its
        group, then the bytes of the scales. The scale of 32 features is the largest magnitude of them / 127, in
        float16; it is infinite for magnitudes above 8.3 million.

    Source:
        ``quantize_row_q8_0_ref`` of llama.cpp's ``ggml/src/ggml-quants.c``, which divides before it rounds the scale.
    """
    groups = _in_groups(x.float())
    scales = (groups.abs().amax(-1) / _MOST).half()
    # A group whose scale is 0 has zeros. A NaN is in the scale of its group, whatever the integers are.
    quotients = (groups / scales.float()[..., None]).nan_to_num(0.0, _MOST, -_MOST)
    integers = quotients.round().clamp(-_MOST, _MOST).to(torch.int8).flatten(-2)[..., : x.shape[-1]]
    return torch.cat([integers, scales.contiguous().view(torch.int8)], dim=-1)


def widen_kv(rows: torch.Tensor) -> torch.Tensor:
    """The float32 keys or values ``[..., D]`` that :func:`round_kv` has left in ``rows``."""
    features = features_of(rows)
    groups = _in_groups(rows[..., :features].float())
    return (groups * _scales(rows).float()[..., None]).flatten(-2)[..., :features]


def _scales(rows: torch.Tensor) -> torch.Tensor:
    """float16 ``[..., ceil(D / 32)]``."""
    return rows[..., features_of(rows) :].contiguous().view(torch.float16)


def _in_groups(x: torch.Tensor) -> torch.Tensor:
    """``x [..., D]`` as ``[..., ceil(D / 32), 32]``, with zeros after the last feature."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


def _fake_round(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], row_size(x.shape[-1], torch.int8)), dtype=torch.int8)


def _fake_widen(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((*rows.shape[:-1], features_of(rows)), dtype=torch.float32)


define("round_kv(Tensor x) -> Tensor", _fake_round, round_kv)
define("widen_kv(Tensor rows) -> Tensor", _fake_widen, widen_kv)
