"""Lossy rules: what they keep, and that they keep more when they are asked for less."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.acceptance import Block, Exact, Forced, Rejection, Relaxed, Rule, Typical, choose_rule
from speccompile.acceptance.lossy import accept_tolerated
from speccompile.acceptance.relaxed import thinking, within_top
from speccompile.acceptance.typical import likely_enough
from speccompile.errors import InvalidOption, MissingFact, PassOrderError, UnknownAcceptance
from speccompile.graph.step_form import StepForm
from speccompile.passes.base import facts
from speccompile.passes.pipeline import Pipeline
from speccompile.passes.step.greedy_accept import greedy_accept
from support.errors import raises

BEGIN, END = 8, 9
many = settings(max_examples=80, deadline=None)


@st.composite
def steps(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, drafts and draft lengths."""
    rows, count, vocab = draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.sampled_from([2, 5, 30]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scores = draw(st.sampled_from([0.2, 1.0, 4.0])) * torch.randn(rows, count + 1, vocab, generator=rng)
    lens = torch.randint(count + 1, (rows,), generator=rng)
    drafts = torch.where(
        torch.rand(rows, count, generator=rng) < 0.5,
        scores[:, :count].argmax(-1),
        torch.randint(vocab, (rows, count), generator=rng),
    )
    return scores, torch.where(torch.arange(count) < lens[:, None], drafts, -1), lens


def typical(step: tuple[torch.Tensor, ...], threshold: float, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    scores, drafts, lens = step
    nothing = torch.zeros(len(lens), 1, dtype=torch.int64)
    kept = likely_enough(scores, drafts, nothing, lens, threshold=threshold, alpha=alpha)
    return accept_tolerated(scores.argmax(-1), drafts, lens, kept, vocab=scores.shape[-1])


def relaxed(
    step: tuple[torch.Tensor, ...], top_k: int, delta: float, *, thinks: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    scores, drafts, lens = step
    text = torch.full((len(lens), 1), BEGIN if thinks else 0)
    options: dict[str, Any] = {"begin": BEGIN, "end": END, "top_k": top_k, "delta": delta}
    kept = within_top(scores, drafts, text, torch.ones_like(lens), **options)
    return accept_tolerated(scores.argmax(-1), drafts, lens, kept, vocab=scores.shape[-1])


def assert_sound(step: tuple[torch.Tensor, ...], tokens: torch.Tensor, accepted: torch.Tensor) -> None:
    """U1, U2, and the token after the drafts is the target's own."""
    scores, drafts, lens = step
    assert (accepted >= 0).all() and (accepted <= lens).all()
    for row, a in enumerate(accepted.tolist()):
        assert tokens[row, :a].tolist() == drafts[row, :a].tolist()
        assert tokens[row, a] == scores[row, a].argmax()


@given(step=steps(), threshold=st.floats(0, 1), alpha=st.floats(0, 2), less=st.floats(0, 1))
@many
def test_typical_keeps_more_at_lower_bars(
    step: tuple[torch.Tensor, ...], threshold: float, alpha: float, less: float
) -> None:
    tokens, accepted = typical(step, threshold, alpha)
    assert_sound(step, tokens, accepted)
    assert (typical(step, threshold * less, alpha)[1] >= accepted).all()
    assert (typical(step, threshold, alpha * less)[1] >= accepted).all()
    # D4: whatever is more likely than the threshold is kept, and at 0 everything that has a probability.
    scores, drafts, lens = step
    likely = scores[:, : drafts.shape[1]].softmax(-1).gather(-1, drafts.clamp(min=0)[..., None])[..., 0] > threshold
    sure = (likely & (torch.arange(drafts.shape[1]) < lens[:, None])).long().cumprod(1).sum(1)
    assert (accepted >= sure).all()
    assert (typical(step, 0.0, 0.0)[1] == step[2]).all()


def test_typical_by_hand() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    entropy = -float((p * p.log()).sum())

    def kept(token: int, alpha: float) -> bool:
        scores, drafts, rows = p.log().expand(1, 2, 4), torch.tensor([[token]]), torch.zeros(1)
        return bool(likely_enough(scores, drafts, rows[:, None], rows, threshold=0.3, alpha=alpha))

    for token, likely in enumerate(p.tolist()):
        assert kept(token, 0.09) == (likely > 0.09 * math.exp(-entropy))
        assert kept(token, 9.0) == (token == 0), "0.3 is not above 0.3, nor what is below"


@given(step=steps(), top_k=st.integers(1, 6), delta=st.floats(0, 1), more=st.floats(0, 1))
@many
def test_relaxed_keeps_more_with_more_tokens_and_a_wider_delta(
    step: tuple[torch.Tensor, ...], top_k: int, delta: float, more: float
) -> None:
    tokens, accepted = relaxed(step, top_k, delta)
    assert_sound(step, tokens, accepted)
    assert (relaxed(step, top_k + 1, delta)[1] >= accepted).all()
    assert (relaxed(step, top_k, delta + more)[1] >= accepted).all()


@given(step=steps(), top_k=st.integers(1, 6), delta=st.floats(0, 1))
@many
def test_relaxed_is_greedy_with_one_token_or_no_delta_or_outside_of_the_phase(
    step: tuple[torch.Tensor, ...], top_k: int, delta: float
) -> None:
    greedy = greedy_accept(*step)
    for tokens, accepted in (
        relaxed(step, 1, delta),
        relaxed(step, top_k, 0.0),
        relaxed(step, top_k, delta, thinks=False),
    ):
        assert torch.equal(accepted, greedy[1])
        for row, a in enumerate(accepted.tolist()):
            assert torch.equal(tokens[row, : a + 1], greedy[0][row, : a + 1])


@given(
    text=st.lists(st.sampled_from([0, 1, BEGIN, END]), min_size=1, max_size=12),
    junk=st.lists(st.just(BEGIN), max_size=3),
)
@many
def test_the_last_token_of_both_decides(text: list[int], junk: list[int]) -> None:
    phase = False
    for token in text:
        phase = token == BEGIN or (phase and token != END)
    tokens = torch.tensor([text + junk])
    assert bool(thinking(tokens, torch.tensor([len(text)]), begin=BEGIN, end=END)) == phase


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (lambda: Typical(threshold=1.5), "threshold", "at most 1"),
        (lambda: Typical(alpha=-1), "alpha", "at least 0"),
        (lambda: Relaxed(1, 1), "end", "differ from the begin token"),
        (lambda: Relaxed(1, 2, top_k=0), "top_k", "at least 1"),
        (lambda: Relaxed(-1, 2), "begin", "at least 0"),
        (lambda: Relaxed(1, 2, delta=float("nan")), "delta", "at least 0"),
        (lambda: choose_rule("relaxed"), "acceptance", r"needs begin, end: pass .*Relaxed\(begin, end\)"),
    ],
)
def test_options_of_lossy_rules_that_are_not_valid_are_refused(make: Any, name: str, reason: str) -> None:
    with raises(InvalidOption, name=name, reason=re.compile(reason)):
        make()


def test_an_unknown_rule_is_refused_with_the_available_names() -> None:
    with raises(
        UnknownAcceptance, name="greedy", available=re.compile("exact, rejection, block, typical, relaxed, forced")
    ):
        choose_rule("greedy")


@pytest.mark.parametrize(
    "rule", [Exact(), Rejection(), Block(), Typical(), Relaxed(1, 2), Forced(1)], ids=lambda r: r.name
)
def test_scores_are_made_before_they_are_judged(rule: Rule) -> None:
    known, goals = {"step_logits", "drafts"}, facts("accepted")
    process, accept = rule.passes(StepForm(1, kind="sampled"))
    Pipeline((process, accept), goals).check(known)
    with pytest.raises(PassOrderError):
        Pipeline((accept, process), goals).check(known)
    with raises(MissingFact, consumer=f"pass '{accept.name}'", fact="scores", provided="drafts, step_logits"):
        Pipeline((accept,), goals).check(known)
    Pipeline(tuple(rule.passes(StepForm(1))), goals).check(known)
