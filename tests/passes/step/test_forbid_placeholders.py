"""Drafts end before a token that stands for an image."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from speccompile.passes.step.forbid_placeholders import before_tokens


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=3))
def test_each_row_keeps_what_is_before_the_first(rows: list[list[int]]) -> None:
    drafts = torch.tensor([row + [-1] * (4 - len(row)) for row in rows])
    lens = torch.tensor([len(row) for row in rows])
    kept, counts = before_tokens(drafts, lens, tokens=(2, 4))
    for row, left, count in zip(rows, kept.tolist(), counts.tolist(), strict=True):
        ends = [at for at, token in enumerate(row) if token in (2, 4)]
        expected = row[: ends[0]] if ends else row
        assert left == expected + [-1] * (4 - len(expected)) and count == len(expected)
