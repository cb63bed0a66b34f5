"""Comparison of the C++ ops of what a head has not read with the functions that other devices run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.draft_rows import form_of
from speccompile.ops.unread_rows import keep_unread_, note_read_, unread_rows, unread_tokens

SLOTS, CAPACITY, KEPT, HIDDEN = 5, 30, 8, 6
IN_CPP = {"linears_fused"}


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops() is None


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 3),
    width=st.integers(1, KEPT),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    strided=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_the_c_plus_plus_ops(rows: int, width: int, dtype: torch.dtype, strided: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(SLOTS, generator=generator)[:rows]
    read_len, length = (torch.randint(0, CAPACITY, (SLOTS,), generator=generator) for _ in range(2))
    tokens = torch.randint(0, 99, (SLOTS, CAPACITY), generator=generator)
    positions = torch.randint(0, CAPACITY - width, (rows, 1), generator=generator) + torch.arange(width)
    hidden = torch.randn(rows, width, HIDDEN * 2, generator=generator).to(dtype)
    hidden = hidden[..., ::2] if strided else hidden[..., :HIDDEN]
    found = []
    for facts in (IN_CPP, set()):
        kept, read = torch.zeros(SLOTS, KEPT, HIDDEN, dtype=dtype), read_len.clone()
        form_of(keep_unread_, facts)(kept, slots, positions, hidden)
        made = form_of(unread_rows, facts)(kept, read, tokens, slots, width)
        made += form_of(unread_tokens, facts)(read, tokens, slots, width)
        form_of(note_read_, facts)(read, length, slots, width)
        found.append([kept, read, *made])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_rows_that_were_kept_are_read_once() -> None:
    """Twenty tokens of one slot, a few at a time: the head reads each position with its hidden state and next token."""
    slots, tokens = torch.tensor([3]), torch.arange(100, 100 + SLOTS * CAPACITY).reshape(SLOTS, CAPACITY)
    kept, read_len = torch.zeros(SLOTS, KEPT, 1), torch.zeros(SLOTS, dtype=torch.int64)
    hidden, at, seen = torch.arange(20.0).reshape(1, 20, 1), 0, []
    for count in (3, 1, 4, 4, 2, 5, 1):
        positions = torch.arange(at, at + count)[None]
        keep_unread_(kept, slots, positions, hidden[:, at : at + count])
        at += count
        if count > 1:
            before = int(read_len[3])
            next_tokens, places, states = unread_rows(kept, read_len, tokens, slots, 6)
            note_read_(read_len, torch.full((SLOTS,), at + 1), slots, 6)
            new = int(read_len[3]) - before
            seen += list(zip(places[0, :new].tolist(), states[0, :new, 0].tolist(), strict=True))
            assert next_tokens[0, :new].tolist() == tokens[3, before + 1 : before + 1 + new].tolist()
    assert seen == [(place, float(place)) for place in range(19)]


def test_sizes_that_do_not_fit_are_refused() -> None:
    one, hidden = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 4)
    with pytest.raises(RuntimeError, match="sizes or dtypes do not fit"):
        torch.ops.speccompile.keep_unread_(torch.zeros(2, 8, 3), one, one[None], hidden)
