"""Blocks of GGUF's quantised types as integers, scales and minimums.

The ``gguf`` package knows the layouts. It dequantises blocks whose scales were set to 1, which returns their integers.
Source: ``gguf.quants``, and ``ggml-quants.c`` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import MXFP4, Q4_K, dequantize

Blocks: TypeAlias = np.ndarray
#: Scales ``[blocks, groups]``, and minimums of the same shape or None; float32.
Scales: TypeAlias = tuple[np.ndarray, np.ndarray | None]

_ONE = np.frombuffer(np.float16(1).tobytes(), dtype=np.uint8)
_ZERO = np.zeros(2, dtype=np.uint8)
#: Rows that are unpacked at a time. The library needs at least four bytes for each value.
_ROWS = 256


@dataclass(frozen=True)
class BlockType:
    """The layout of blocks of one type, to separate values from scales.

    Args:
        bits: bits of a value in a :class:`~speccompile.quantized.weight.GroupedWeight`.
        group: number of values that share a scale.
        make_units: sets the scales of uint8 ``[blocks, bytes]`` to 1 and the minimums to 0, in place.
        scales: reads the scales and minimums.
    """

    bits: int
    group: int
    make_units: Callable[[Blocks], None]
    scales: Callable[[Blocks], Scales]


def unpack_blocks(data: np.ndarray, kind: GGMLQuantizationType) -> tuple[np.ndarray, Scales]:
    """Unpack uint8 ``[N, bytes]`` into values int8 ``[N, K]``, and scales and minimums float32 ``[N, G]``."""
    block_type = TYPES[kind]
    size, nbytes = GGML_QUANT_SIZES[kind]
    outputs, inputs = data.shape[0], data.shape[1] // nbytes * size
    values = np.empty((outputs, inputs), dtype=np.int8)
    for rows in range(0, outputs, _ROWS):
        units = np.array(data[rows : rows + _ROWS]).reshape(-1, nbytes)
        block_type.make_units(units)
        values[rows : rows + _ROWS] = _dequantize(units, kind).reshape(-1, inputs)
    scales, minimums = block_type.scales(np.ascontiguousarray(data).reshape(-1, nbytes))
    groups = (outputs, inputs // block_type.group)
    return values, (scales.reshape(groups), None if minimums is None else minimums.reshape(groups))


def _dequantize(blocks: Blocks, kind: GGMLQuantizationType) -> np.ndarray:
    """Dequantise blocks as float32 ``[blocks, values]``. They are passed as one row, since the library loops over
    rows by sixteen."""
    values: np.ndarray = dequantize(blocks.reshape(1, -1), kind).reshape(len(blocks), -1)
    return values


def _half(blocks: Blocks, start: int) -> np.ndarray:
    """The half-precision number at ``start`` of each block, as float32 ``[blocks, 1]``."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _simple(scale: int, minimum: int | None = None) -> tuple[Callable[[Blocks], None], Callable[[Blocks], Scales]]:
    """Functions for a type whose blocks are one group. GGUF adds the minimum, and a GroupedWeight subtracts it."""

    def make_units(blocks: Blocks) -> None:
        blocks[:, scale : scale + 2] = _ONE
        if minimum is not None:
            blocks[:, minimum : minimum + 2] = _ZERO

    def scales(blocks: Blocks) -> Scales:
        return _half(blocks, scale), None if minimum is None else -_half(blocks, minimum)

    return make_units, scales


def _make_units_k(blocks: Blocks) -> None:
    """Set the scales of Q4_K and Q5_K: eight scales and minimums of six bits in twelve bytes, after two factors."""
    blocks[:, 0:2], blocks[:, 2:4] = _ONE, _ZERO
    blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16] = 1, 0, 1


def _scales_k(blocks: Blocks) -> Scales:
    scales, minimums = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    return _half(blocks, 0) * scales.astype(np.float32), _half(blocks, 2) * minimums.astype(np.float32)


def _make_units_q2_k(blocks: Blocks) -> None:
    blocks[:, 0:16] = 1
    blocks[:, 80:82], blocks[:, 82:84] = _ONE, _ZERO


def _scales_q2_k(blocks: Blocks) -> Scales:
    both = blocks[:, 0:16]
    return _half(blocks, 80) * (both & 15).astype(np.float32), _half(blocks, 82) * (both >> 4).astype(np.float32)


def _make_units_q3_k(blocks: Blocks) -> None:
    # Sixteen scales of six bits, minus 32: 33 has the four low bits 1 and the two high bits 2.
    blocks[:, 96:104], blocks[:, 104:108] = 0x11, 0xAA
    blocks[:, 108:110] = _ONE


def _scales_q3_k(blocks: Blocks) -> Scales:
    ones = blocks.copy()
    ones[:, 0:32], ones[:, 32:96] = 0xFF, 0x55
    return _dequantize(ones, GGMLQuantizationType.Q3_K)[:, ::16], None


def _make_units_q6_k(blocks: Blocks) -> None:
    blocks[:, 192:208] = 1
    blocks[:, 208:210] = _ONE


def _scales_q6_k(blocks: Blocks) -> Scales:
    return _half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32), None


def _make_units_iq4_xs(blocks: Blocks) -> None:
    # Eight scales of six bits, minus 32: two high bits of 2 each, and four low bits of 1.
    blocks[:, 0:2], blocks[:, 2:4], blocks[:, 4:8] = _ONE, 0xAA, 0x11


def _scales_iq4_xs(blocks: Blocks) -> Scales:
    ones = blocks.copy()
    # Entry 8 of the table of values is 1.
    ones[:, 8:136] = 0x88
    return _dequantize(ones, GGMLQuantizationType.IQ4_XS)[:, ::32], None


def _make_units_mxfp4(blocks: Blocks) -> None:
    # The scale is a power of two, stored as its exponent.
    blocks[:, 0] = 128


def _scales_mxfp4(blocks: Blocks) -> Scales:
    return MXFP4.e8m0_to_fp32_half(blocks[:, 0:1]), None


_Kind = GGMLQuantizationType
TYPES: dict[GGMLQuantizationType, BlockType] = {
    _Kind.Q8_0: BlockType(8, 32, *_simple(0)),
    _Kind.Q4_0: BlockType(4, 32, *_simple(0)),
    _Kind.Q4_1: BlockType(4, 32, *_simple(0, 2)),
    _Kind.Q5_0: BlockType(6, 32, *_simple(0)),
    _Kind.Q5_1: BlockType(6, 32, *_simple(0, 2)),
    _Kind.Q2_K: BlockType(4, 16, _make_units_q2_k, _scales_q2_k),
    _Kind.Q3_K: BlockType(4, 16, _make_units_q3_k, _scales_q3_k),
    _Kind.Q4_K: BlockType(4, 32, _make_units_k, _scales_k),
    _Kind.Q5_K: BlockType(6, 32, _make_units_k, _scales_k),
    _Kind.Q6_K: BlockType(6, 16, _make_units_q6_k, _scales_q6_k),
    _Kind.IQ4_NL: BlockType(8, 32, *_simple(0)),
    _Kind.IQ4_XS: BlockType(8, 32, _make_units_iq4_xs, _scales_iq4_xs),
    _Kind.MXFP4: BlockType(6, 32, _make_units_mxfp4, _scales_mxfp4),
}
