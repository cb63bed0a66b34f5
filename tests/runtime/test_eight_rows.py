"""Eight rows of which some are past the drafter's longest text, some want no drafts, and some have no match."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.modes import registry
from speccompile.modes.ngram import NGram
from support.tiny import greedy, random_prompt

ROWS = 8
NEW = 24
#: Of the drafter: it knows nothing of longer texts.
LONGEST = 40


@dataclass(frozen=True)
class ShortSighted(NGram):
    """N-grams in texts of at most ``longest`` tokens, their drafts included."""

    longest: int = LONGEST

    name: ClassVar[str] = "short_sighted"

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        drafts, lens = super().propose(tokens, length, *own_state, draft_len=draft_len)
        return drafts, torch.minimum(lens, self.longest - 1 - length).clamp(min=0)


TINY = {}


@pytest.fixture(scope="module", params=["fixed:3", "cost"])
def spec(model: LlamaForCausalLM, request: pytest.FixtureRequest) -> Iterator[Speculator]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_modes", dict(registry._modes) | {"short_sighted": ShortSighted})
        # All prompts are read before the first step.
        sizes = {"tiers": (0, 1, 3), "max_batch": ROWS, "max_len": 96, "prefill_budget": 10_000, "prefix_reuse": False}
        yield speccompile.wrap(model, "short_sighted", backend="eager", min_ngram=2, policy=request.param, **sizes)


def test_each_row_has_its_own_text_and_lengths(spec: Speculator, model: LlamaForCausalLM) -> None:
    # The first two are alike, but for how many drafts they want.
    repeats = [random_prompt(4, seed) * 3 for seed in (0, 0, 1, 2)]
    past = [random_prompt(6, seed) * 8 for seed in (10, 11)]
    unmatched = [list(range(40 + seed, 52 + seed)) for seed in (0, 20)]
    prompts = [*repeats, *past, *unmatched]
    limits = [None, 2, 0, 0, None, None, None, None]
    engine = spec.engine
    engine.prepare("greedy", watched=True)
    spec.stats.reset()
    before = spec.arena.fingerprint()
    requests = [
        engine.submit(prompt, max_new_tokens=NEW, num_draft_tokens=limit)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    together = 0
    while not engine.idle:
        rows = [request for request in engine.running if request.new_tokens]
        lens = {request: (int(spec.arena["draft_lens"][request.slot]), known(request)) for request in rows}
        engine.step()
        together = max(together, len(rows))
        for request, (proposed, length) in lens.items():
            # What the drafter has for a text of so many tokens, whatever else is in the batch.
            assert proposed <= max(0, LONGEST - 1 - length)
            judged = int(spec.arena["proposed"][request.slot])
            if not request.finished:
                assert judged <= min(proposed, 3 if request.params.num_draft_tokens is None else 2)
    assert together == ROWS
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.new_tokens == greedy(model, prompt, NEW)
    stats_of = [request.stats for request in requests]
    # Drafts by position, of each request its own.
    assert stats_of[1].proposed_at[2] == 0 and all(stats.draft_tokens == 0 for stats in stats_of[2:6])
    assert sum(stats.draft_tokens for stats in stats_of) == spec.stats.draft_tokens
    if spec.policy != speccompile.policies.Cost():
        assert stats_of[0].draft_tokens > 0 and stats_of[1].proposed_at[1] > 0
    assert all(stats.row_steps == NEW - 1 - stats.accepted_tokens for stats in stats_of)
    assert spec.arena.fingerprint() == before


def known(request: speccompile.runtime.request.Request) -> int:
    return len(request.prompt) + len(request.new_tokens)


def test_where_nobody_has_a_draft_no_width_runs(spec: Speculator) -> None:
    spec.stats.reset()
    for seed in (10, 11):
        spec.engine.submit(random_prompt(6, seed) * 8, max_new_tokens=NEW)
    spec.engine.submit(random_prompt(4, 0) * 3, max_new_tokens=NEW, num_draft_tokens=0)
    spec.engine.run()
    assert set(spec.stats.tier_steps) == {0}
    assert spec.stats.no_proposal_steps == spec.stats.steps
