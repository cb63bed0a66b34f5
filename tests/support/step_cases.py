"""Texts to look for n-grams in, and steps to commit, for every kernel that does it, and what they should come to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from speccompile.modes.ngram import NGram
from speccompile.ops.commit import commit
from speccompile.passes.step.greedy_accept import greedy_accept


@dataclass(frozen=True)
class Match:
    """``tokens [N, S]``, ``length [N]``, ``slots [B]``."""

    tokens: torch.Tensor
    length: torch.Tensor
    slots: torch.Tensor
    mode: NGram
    draft_len: int

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
        """Of the op."""
        return self.tokens, self.length, self.slots, self.mode.max_ngram, self.mode.min_ngram, self.draft_len

    @property
    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.mode.propose(self.tokens[self.slots], self.length[self.slots], draft_len=self.draft_len)


def _match(
    capacity: int, lengths: list[int], max_ngram: int, min_ngram: int, draft_len: int, kinds: int, seed: int
) -> Match:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(len(lengths) + 1, generator=generator)[:-1]
    tokens = torch.randint(kinds, (len(lengths) + 1, capacity), generator=generator)
    length = torch.zeros(len(tokens), dtype=torch.int64)
    length[slots] = torch.tensor(lengths).clamp(max=capacity)
    return Match(tokens, length, slots, NGram(max(max_ngram, min_ngram), min_ngram), draft_len)


#: ``kinds``: how many different tokens there are.
matches = st.builds(
    _match,
    capacity=st.integers(1, 60),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    max_ngram=st.integers(1, 4),
    min_ngram=st.integers(1, 4),
    draft_len=st.integers(1, 9),
    kinds=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)


@dataclass(frozen=True)
class Outcome:
    """What a step found, and the state that it is committed to; ``counted`` if a rule has decided what is accepted."""

    state: dict[str, torch.Tensor]
    slots: torch.Tensor
    target: torch.Tensor
    drafts: torch.Tensor
    draft_lens: torch.Tensor
    accepted: torch.Tensor
    ready: torch.Tensor | None
    counted: bool

    @property
    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        """Of the op."""
        judged = (self.accepted, None) if self.counted else (None, self.drafts)
        return *self.state.values(), self.slots, self.target, self.draft_lens, *judged, self.ready

    def expected(self) -> dict[str, torch.Tensor]:
        """The state afterwards."""
        state = {name: value.clone() for name, value in self.state.items()}
        rows = {"slots": self.slots, "row_accepted": self.accepted, "row_draft_lens": self.draft_lens}
        commit(**state, target_tokens=self.target, ready=self.ready, **rows)
        return state


def _outcome(
    rows: int, drafted: int, kinds: int, ends: int, with_ready: bool, counted: bool, undecided: bool, seed: int
) -> Outcome:
    generator = torch.Generator().manual_seed(seed)

    def whole(high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    count, capacity = rows + 2, 20
    slots = torch.randperm(count, generator=generator)[:rows]
    length = whole(capacity - drafted, count, low=1)
    state = {
        "tokens": whole(kinds, count, capacity + 1),
        "length": length,
        # At most max_len, before which a step's own places end.
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
    target, accepted = greedy_accept(logits, drafts, draft_lens)
    if counted:
        accepted = torch.minimum(whole(drafted + 1, rows), draft_lens)
    return Outcome(state, slots, target, drafts, draft_lens, accepted, ready, counted)


outcomes = st.builds(
    _outcome,
    rows=st.integers(1, 4),
    drafted=st.integers(0, 8),
    kinds=st.integers(1, 3),
    ends=st.integers(1, 3),
    with_ready=st.booleans(),
    counted=st.booleans(),
    undecided=st.booleans(),
    seed=st.integers(0, 10**6),
)
