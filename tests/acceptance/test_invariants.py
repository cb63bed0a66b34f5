"""What holds of every rule, whatever the scores, drafts and seeds are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile import acceptance
from support.rules import FORCED, LOSSY, RULES

ALL = RULES | LOSSY | {"forced": FORCED}


@dataclass(frozen=True)
class Case:
    scores: torch.Tensor
    drafts: torch.Tensor
    lens: torch.Tensor
    length: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor
    draft_probs: torch.Tensor | None = None

    def run(self, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
        given_tensors = (self.scores, self.drafts, self.lens, self.length, self.temperature, self.seed)
        return ALL[rule](*given_tensors, self.draft_probs)

    def rows(self, index: torch.Tensor) -> Case:
        probs = None if self.draft_probs is None else self.draft_probs[index]
        fields = (self.scores, self.drafts, self.lens, self.length, self.temperature, self.seed)
        return Case(*(tensor[index] for tensor in fields), probs)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows, count, vocab = draw(st.integers(1, 5)), draw(st.integers(0, 4)), draw(st.sampled_from([2, 3, 10, 100]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scores = 2 * torch.randn(rows, count + 1, vocab, generator=rng)
    # Some tokens are forbidden, never all.
    forbidden = torch.rand(scores.shape, generator=rng) < draw(st.sampled_from([0.0, 0.5]))
    forbidden[..., 0] = False
    scores = scores.masked_fill(forbidden, float("-inf"))
    lens = torch.randint(count + 1, (rows,), generator=rng)
    likely = scores[:, :count].argmax(-1)
    guesses = torch.randint(vocab, (rows, count), generator=rng)
    drafts = torch.where(torch.rand(rows, count, generator=rng) < 0.6, likely, guesses)
    drafts = torch.where(torch.arange(count) < lens[:, None], drafts, -1)
    length = torch.randint(1, 1000, (rows,), generator=rng)
    temperature = torch.where(torch.rand(rows, generator=rng) < 0.3, 0.0, 1.0)
    seed = torch.randint(2**62, (rows,), generator=rng)
    probs = None
    if draw(st.booleans()):
        probs = torch.randn(rows, count, vocab, generator=rng).softmax(-1)
    return Case(scores, drafts, lens, length, temperature, seed, probs)


each_rule = pytest.mark.parametrize("rule", list(ALL))
each_lossless_rule = pytest.mark.parametrize("rule", list(RULES))
many = settings(max_examples=80, deadline=None)


def test_every_rule_is_here() -> None:
    assert ALL.keys() == acceptance.RULES.keys()
    assert RULES.keys() == {name for name, rule in acceptance.RULES.items() if rule.lossless}


@each_rule
@given(case=cases())
@many
def test_counts_drafts_and_support(rule: str, case: Case) -> None:
    """U1: 0 <= a <= K_b. U2: accepted tokens are the drafts. U4: what is emitted has a probability, accepted or not
    (but for ``forced``, where that holds of the last one)."""
    tokens, accepted = case.run(rule)
    assert tokens.dtype == accepted.dtype == torch.int64 and tokens.shape == case.scores.shape[:2]
    for row in range(len(tokens)):
        a = int(accepted[row])
        assert 0 <= a <= int(case.lens[row])
        assert tokens[row, :a].tolist() == case.drafts[row, :a].tolist()
        assert ((tokens[row, : a + 1] >= 0) & (tokens[row, : a + 1] < case.scores.shape[-1])).all()
        emitted = case.scores[row, torch.arange(a + 1), tokens[row, : a + 1]]
        assert (emitted[a if rule == "forced" else 0 :] > float("-inf")).all()


@each_rule
@given(case=cases(), data=st.data())
@many
def test_rows_know_nothing_of_each_other(rule: str, case: Case, data: st.DataObject) -> None:
    """U6, U9, U10: permuted, alone, and again, the same."""
    tokens, accepted = case.run(rule)
    order = torch.tensor(data.draw(st.permutations(range(len(tokens)))))
    moved, moved_accepted = case.rows(order).run(rule)
    assert torch.equal(moved, tokens[order]) and torch.equal(moved_accepted, accepted[order])
    alone, alone_accepted = case.rows(order[:1]).run(rule)
    assert torch.equal(alone[0], tokens[order[0]]) and alone_accepted[0] == accepted[order[0]]


@pytest.mark.parametrize("rule", [name for name in ALL if name != "block"])
@given(case=cases(), data=st.data())
@many
def test_what_comes_later_changes_nothing(rule: str, case: Case, data: st.DataObject) -> None:
    """U5, which ``block`` does not have, and U7: neither scores nor drafts after the first token that was not
    accepted, nor garbage there."""
    tokens, accepted = case.run(rule)
    scores, drafts = case.scores.clone(), case.drafts.clone()
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    for row, a in enumerate(accepted.tolist()):
        scores[row, a + 1 :] = (
            float("nan") if data.draw(st.booleans()) else torch.randn(scores.shape[-1], generator=rng)
        )
        drafts[row, a + 1 :] = data.draw(st.sampled_from([-1, 0, 10**6]))
    again, again_accepted = replace(case, scores=scores, drafts=drafts).run(rule)
    assert torch.equal(again_accepted, accepted)
    for row, a in enumerate(accepted.tolist()):
        assert torch.equal(again[row, : a + 1], tokens[row, : a + 1])


@each_rule
@given(case=cases())
@many
def test_a_wider_step_decides_the_same(rule: str, case: Case) -> None:
    """U7: more places than a row has drafts, holding whatever."""
    tokens, accepted = case.run(rule)
    more = torch.full_like(case.scores, float("nan"))
    wider = replace(
        case,
        scores=torch.cat([case.scores, more], dim=1),
        drafts=torch.nn.functional.pad(case.drafts, (0, case.scores.shape[1]), value=-1),
        draft_probs=None
        if case.draft_probs is None
        else torch.nn.functional.pad(case.draft_probs, (0, 0, 0, case.scores.shape[1]), value=float("nan")),
    )
    wide, wide_accepted = wider.run(rule)
    assert torch.equal(wide_accepted, accepted)
    for row, a in enumerate(accepted.tolist()):
        assert torch.equal(wide[row, : a + 1], tokens[row, : a + 1])


@each_lossless_rule
@given(case=cases())
@many
def test_rows_at_temperature_0_are_greedy(rule: str, case: Case) -> None:
    """U11, and D1: they emit the prefix of the greedy text."""
    tokens, accepted = case.run(rule)
    greedy = case.scores.argmax(-1)
    for row, a in enumerate(accepted.tolist()):
        if case.temperature[row] == 0:
            assert torch.equal(tokens[row, : a + 1], greedy[row, : a + 1])
            if case.draft_probs is None:
                agree = (case.drafts[row] == greedy[row, :-1]).long().cumprod(0).sum()
                assert a == min(int(agree), int(case.lens[row]))


@each_rule
@given(case=cases())
@many
def test_without_drafts_it_is_plain_sampling_of_the_same_seed(rule: str, case: Case) -> None:
    """U8: alone or in a wide step."""
    none = replace(case, lens=torch.zeros_like(case.lens), drafts=torch.full_like(case.drafts, -1))
    tokens, accepted = none.run(rule)
    narrow = replace(none, scores=case.scores[:, :1], drafts=case.drafts[:, :0], draft_probs=None)
    assert not accepted.any()
    assert torch.equal(tokens[:, 0], narrow.run(rule)[0][:, 0])


@each_rule
@pytest.mark.parametrize("vocab", [100, 8193, 10_000])
def test_no_id_behind_the_vocabulary_is_ever_emitted(rule: str, vocab: int) -> None:
    """U12: also where the last tile of a kernel would hold nothing but zeros."""
    scores = torch.full((64, 3, vocab), -50.0)
    scores[..., 0] = 0.0
    ones = torch.ones(64)
    drafts = torch.zeros(64, 2, dtype=torch.int64)
    case = Case(scores, drafts, torch.full((64,), 2), torch.arange(64) + 1, ones, torch.arange(64))
    tokens, _ = case.run(rule)
    assert int(tokens.max()) < vocab and int(tokens.min()) >= 0


@each_rule
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_where_nothing_can_be_chosen(rule: str, bad: float) -> None:
    scores = torch.zeros(2, 2, 5)
    scores[0, 0] = bad
    for temperature in (0.0, 1.0):
        case = Case(
            scores, torch.tensor([[1], [0]]), torch.tensor([1, 1]), torch.tensor([4, 4]),
            torch.full((2,), temperature), torch.tensor([1, 2]),
        )  # fmt: skip
        tokens, accepted = case.run(rule)
        assert int(tokens[0, 0]) == -1 and int(accepted[0]) == 0
        assert int(tokens[1, 0]) >= 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
@given(case=cases(), data=st.data())
@many
def test_what_is_no_number_in_q_counts_as_0(rule: str, case: Case, data: st.DataObject) -> None:
    """U14: of drafts that are offered, too."""
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    q = torch.randn(case.scores[:, 1:].shape, generator=rng).softmax(-1)
    bad = torch.rand(q.shape, generator=rng) < data.draw(st.sampled_from([0.1, 0.5, 1.0]))
    kinds = torch.tensor([float("nan"), float("inf"), float("-inf")])[torch.randint(3, q.shape, generator=rng)]
    tokens, accepted = replace(case, draft_probs=torch.where(bad, kinds, q)).run(rule)
    wanted = replace(case, draft_probs=q.masked_fill(bad, 0.0)).run(rule)
    assert torch.equal(tokens, wanted[0]) and torch.equal(accepted, wanted[1])
    assert ((accepted >= 0) & (accepted <= case.lens)).all()
    last = accepted[:, None]
    chosen = tokens.gather(1, last)
    assert (chosen >= 0).all()
    places = case.scores.gather(1, last[..., None].expand(-1, -1, case.scores.shape[-1]))
    assert (places.gather(-1, chosen[..., None]) > -torch.inf).all()


@given(case=cases(), seed=st.integers(0, 2**32))
@many
def test_under_exact_the_text_does_not_depend_on_the_drafts(case: Case, seed: int) -> None:
    tokens, accepted = case.run("exact")
    other = torch.randint(case.scores.shape[-1], case.drafts.shape, generator=torch.Generator().manual_seed(seed))
    again, again_accepted = replace(case, drafts=other, lens=torch.full_like(case.lens, other.shape[1])).run("exact")
    for row, (a, b) in enumerate(zip(accepted.tolist(), again_accepted.tolist(), strict=True)):
        shared = min(a, b) + 1
        assert torch.equal(tokens[row, :shared], again[row, :shared])
