"""Sequences with drafts after them, in C++ as by the definition."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops import row_contexts
from speccompile.ops.cpu.library import load_cpu_ops


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 3), count=st.integers(0, 4), lengths=st.lists(st.integers(1, 8), min_size=5, max_size=5))
def test_contexts_are_the_defined_ones(rows: int, count: int, lengths: list[int]) -> None:
    assert load_cpu_ops() is None
    tokens, slots = torch.arange(5 * 8).view(5, 8), torch.tensor([4, 0, 2])[:rows]
    # A view: other drafts are beside these. Drafts beyond the cache stand at its end, the last one over the others.
    drafts = 100 + torch.arange(3 * 6).view(3, 6)[:rows, :count]
    given = tokens, torch.tensor(lengths), slots, drafts
    found = torch.ops.speccompile.row_contexts(*given)
    assert all(map(torch.equal, found, row_contexts.reference(*given)))
