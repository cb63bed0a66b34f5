"""Packed integers: fields of any bits, also across words."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from speccompile.quantized.bit_fields import unpack, words_for


@given(seed=st.integers(0, 2**32 - 1), bits=st.integers(2, 8), count=st.integers(1, 200), rows=st.integers(1, 3))
def test_fields_are_those_of_one_large_number(seed: int, bits: int, count: int, rows: int) -> None:
    fields = torch.randint(0, 1 << bits, (rows, count), generator=torch.Generator().manual_seed(seed))
    size = words_for(count, bits)
    data = b""
    for row in fields.tolist():
        number = sum(value << (place * bits) for place, value in enumerate(row))
        data += number.to_bytes(4 * size, "little")
    words = torch.frombuffer(bytearray(data), dtype=torch.int32).view(rows, size)
    assert torch.equal(unpack(words, bits, count), fields.to(torch.int16))
