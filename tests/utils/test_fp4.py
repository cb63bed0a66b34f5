"""E2M1 as integers, against the table of transformers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import FP4_VALUES

from speccompile.utils.fp4 import NUMBERS, decode, encode, is_fp4


def test_numbers_are_the_values_doubled() -> None:
    assert [2 * value for value in FP4_VALUES] == list(NUMBERS)


def test_every_code_is_decoded_and_encoded() -> None:
    codes = torch.arange(16, dtype=torch.int8)
    numbers = decode(codes)
    assert numbers.dtype == torch.int8 and numbers.tolist() == list(NUMBERS) and is_fp4(numbers)
    # Of the two zeros the one without a sign is written.
    assert encode(numbers).dtype == torch.int8
    assert encode(numbers).tolist() == [0 if code == 8 else code for code in range(16)]


@given(st.lists(st.integers(-128, 127), min_size=1))
def test_other_integers_are_seen(numbers: list[int]) -> None:
    assert is_fp4(torch.tensor([numbers], dtype=torch.int8)) == set(NUMBERS).issuperset(numbers)
