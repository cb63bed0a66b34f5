"""Blocks of GGUF's types, taken apart: their dequantised values have the bits of the ``gguf`` package's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.quantized import GroupedWeight
from speccompile.quantized.gguf_blocks import TYPES, unpack_blocks
from support.quantized_gguf import HALVES, blocks

#: Where blocks of each type have numbers of half precision.
HALF_PLACES = {
    **HALVES,
    GGMLQuantizationType.Q8_0: (0,),
    GGMLQuantizationType.Q4_0: (0,),
    GGMLQuantizationType.Q5_0: (0,),
    GGMLQuantizationType.Q4_1: (0, 2),
    GGMLQuantizationType.Q5_1: (0, 2),
    GGMLQuantizationType.MXFP4: (),
}
ROWS, WIDTH = 6, 512


def grouped(data: np.ndarray, kind: GGMLQuantizationType) -> GroupedWeight:
    values, (scales, minimums) = unpack_blocks(data, kind)
    return GroupedWeight(
        values=torch.from_numpy(values),
        bits=TYPES[kind].bits,
        scales=torch.from_numpy(np.ascontiguousarray(scales)),
        minimums=None if minimums is None else torch.from_numpy(np.ascontiguousarray(minimums)),
        group=TYPES[kind].group,
    )


def same_bits(left: torch.Tensor, right: np.ndarray) -> bool:
    return np.array_equal(left.numpy().view(np.uint32), np.ascontiguousarray(right).view(np.uint32))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_blocks_have_the_bits_of_the_library(kind: GGMLQuantizationType, seed: int) -> None:
    """Every byte is drawn, so that scales have both signs, and values their whole range."""
    generator = np.random.default_rng(seed)
    data = blocks(np.zeros((ROWS, WIDTH), dtype=np.float32), kind)
    drawn = generator.integers(0, 256, data.shape, dtype=np.uint8)
    flat = drawn.reshape(-1, GGML_QUANT_SIZES[kind][1])
    for start in HALF_PLACES[kind]:
        # The highest exponent stands for infinity and NaN.
        flat[:, start + 1] &= 0xBF
    if kind == GGMLQuantizationType.MXFP4:
        flat[:, 0] = generator.integers(0, 240, len(flat))
    assert same_bits(grouped(drawn, kind).dequantize(), dequantize(drawn, kind))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_each_value_of_a_type_fits_its_bits(kind: GGMLQuantizationType) -> None:
    """GroupedWeight checks the range; here all bytes of the values' fields occur."""
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((64, WIDTH)).astype(np.float32)
    assert grouped(blocks(weight, kind), kind).shape == (64, WIDTH)
