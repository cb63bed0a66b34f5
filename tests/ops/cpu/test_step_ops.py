"""The C++ ops that commit and look for n-grams: what the functions do that steps are otherwise made of."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings

import speccompile.ops  # noqa: F401  defines the ops
from speccompile import wrap
from speccompile.modes import registry
from speccompile.modes.ngram import NGram
from speccompile.ops.cpu.library import load_cpu_ops
from support.step_cases import Match, Outcome, matches, outcomes
from support.tiny import greedy, random_prompt, tiny_llama

ops = torch.ops.speccompile


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops() is None


@settings(max_examples=300)
@given(matches)
def test_ngram_match(match: Match) -> None:
    for one, other in zip(ops.match_ngram(*match.arguments), match.expected, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)


@settings(max_examples=500)
@given(outcomes)
def test_accept_and_commit(outcome: Outcome) -> None:
    expected = outcome.expected()
    ops.accept_commit_(*outcome.arguments)
    for name, value in outcome.state.items():
        assert torch.equal(value, expected[name]), name


def test_what_lies_apart_is_read_in_its_order() -> None:
    """Rows, targets and drafts are what a step computed; nothing says how they lie."""
    tokens = torch.zeros((3, 12), dtype=torch.int64)
    one, three = torch.full((3,), 1), torch.full((3,), 3)
    state = [tokens, three, torch.full((3,), 9), one > 0, -one[:, None], one.clone(), one.clone(), one.clone()]
    target, drafts = torch.tensor([[4, 5], [6, 7], [8, 9]]).t(), torch.tensor([[4, 0], [6, 7]])
    ops.accept_commit_(*state, torch.tensor([2, 7, 0, 7])[::2], target, torch.tensor([2, 1]), None, drafts.t())
    assert tokens[:, 3:7].tolist() == [[5, 0, 0, 0], [0] * 4, [4, 6, 8, 0]]


def test_state_of_another_kind_is_refused() -> None:
    tokens, length, slots = torch.zeros((2, 8), dtype=torch.int64), torch.ones(2, dtype=torch.int64), torch.arange(2)
    with pytest.raises(RuntimeError, match="int64, side by side"):
        ops.match_ngram(tokens.int(), length, slots, 3, 1, 4)
    with pytest.raises(RuntimeError, match="int64, side by side"):
        ops.match_ngram(tokens.t(), length, slots, 3, 1, 4)


class Abstains(NGram):
    """Proposes nothing, whatever the text."""

    name: ClassVar[str] = "abstains"

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        drafts, lens = super().propose(tokens, length, *own_state, draft_len=draft_len)
        return drafts, torch.zeros_like(lens)


def test_a_mode_made_of_it_that_proposes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_modes", dict(registry._modes) | {"abstains": Abstains})
    with wrap(tiny_llama(), "abstains", tiers=(0, 3), max_len=64, policy="fixed:3", backend="inductor") as spec:
        spec.generate(torch.tensor([[5, 6, 5, 6, 5, 6, 5]]), max_new_tokens=20)
        assert spec.stats.draft_tokens == 0


def test_compiled_steps_call_them() -> None:
    model = tiny_llama()
    prompt = random_prompt(9)
    with wrap(model, "ngram", tiers=(0, 3), max_len=64, policy="fixed:3", backend="inductor") as spec:
        for name, tier in [*spec.engine.tiers.items(), *spec.engine.prefill_tiers.items()]:
            counts = tier.graph.op_counts()
            assert counts.get("speccompile.accept_commit_.default", 0) == ("inner" not in name), name
            assert counts["speccompile.match_ngram.default"] == 1
        text = spec.generate(torch.tensor([prompt]), max_new_tokens=20)[0, len(prompt) :]
        assert text.tolist() == greedy(model, prompt, 20)
