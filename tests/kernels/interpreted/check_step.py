"""N-gram match, acceptance and commit as kernels against the functions that steps run (run by test_interpreted.py)."""

from __future__ import annotations

import loop_bounds  # noqa: F401
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from speccompile.lowering.ops.commit import _on_cuda
from speccompile.lowering.triton import ngram
from speccompile.modes.ngram import NGram
from speccompile.passes.commit import commit
from speccompile.passes.greedy_accept import greedy_accept

generated = settings(deadline=None, max_examples=80, phases=[Phase.explicit, Phase.generate])


@pytest.fixture(scope="module", autouse=True)
def small_spans() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "SPAN", 8)
        yield


@generated
@given(
    capacity=st.integers(1, 60),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    max_ngram=st.integers(1, 4),
    min_ngram=st.integers(1, 4),
    draft_len=st.integers(1, 9),
    kinds=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_ngram_match(
    capacity: int, lengths: list[int], max_ngram: int, min_ngram: int, draft_len: int, kinds: int, seed: int
) -> None:
    """``kinds``: how many different tokens there are."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(len(lengths) + 1, generator=generator)[:-1]
    tokens = torch.randint(kinds, (len(lengths) + 1, capacity), generator=generator)
    length = torch.zeros(len(tokens), dtype=torch.int64)
    length[slots] = torch.tensor(lengths).clamp(max=capacity)
    mode = NGram(max(max_ngram, min_ngram), min_ngram)
    expected = mode.propose(tokens[slots], length[slots], draft_len=draft_len)
    got = ngram.match(tokens, length, slots, mode.max_ngram, mode.min_ngram, draft_len)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)


@generated
@given(
    rows=st.integers(1, 4),
    drafted=st.integers(0, 8),
    kinds=st.integers(1, 3),
    ends=st.integers(1, 3),
    with_ready=st.booleans(),
    counted=st.booleans(),
    undecided=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_accept_and_commit(
    rows: int, drafted: int, kinds: int, ends: int, with_ready: bool, counted: bool, undecided: bool, seed: int
) -> None:
    """``counted``: a rule has decided what is accepted."""
    generator = torch.Generator().manual_seed(seed)

    def whole(high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    count, capacity = rows + 2, 20
    slots = torch.randperm(count, generator=generator)[:rows]
    length = whole(capacity - drafted, count, low=1)
    state = {
        "tokens": whole(kinds, count, capacity + 1),
        "length": length,
        # At most max_len, in front of which a step's own places end.
        "limit": length + whole(drafted + 3, count),
        "alive": whole(4, count) > 0,
        # -1 where a request has fewer.
        "eos": whole(kinds + 4, count, ends, low=-1),
        "emitted": whole(9, count),
        "accepted": whole(9, count),
        "proposed": whole(9, count),
    }
    logits = torch.randn(rows, drafted + 1, kinds, generator=generator)
    if undecided:
        logits[whole(3, rows, drafted + 1) == 0] = float("nan")
    drafts = whole(kinds, rows, drafted)
    draft_lens = whole(drafted + 1, rows)
    ready = whole(3, rows) > 0 if with_ready else None
    target, right = greedy_accept(logits, drafts, draft_lens)
    if counted:
        right = torch.minimum(whole(drafted + 1, rows), draft_lens)

    expected = {name: value.clone() for name, value in state.items()}
    commit(**expected, slots=slots, target_tokens=target, row_accepted=right, row_draft_lens=draft_lens, ready=ready)
    judged = (right, None) if counted else (None, drafts)
    _on_cuda(*state.values(), slots, target, draft_lens, *judged, ready)
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name
