"""Which policy is the default, and how quickly tiers are timed for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.acceptance import RULES, Typical
from speccompile.policies import Cost, Fixed, default_policy
from speccompile.runtime.measure import MOST_REPEATS
from support.clocks import SimulatedClock
from support.tiny import greedy, random_prompt


# Built for each test: its tiers are timed once, and a test fixes one.
@pytest.fixture
def spec(model: LlamaForCausalLM) -> Iterator[Speculator]:
    with speccompile.wrap(model, "ngram", tiers=(0, 1, 3), max_batch=4, max_len=96, backend="eager") as spec:
        yield spec


def test_cost_where_there_is_a_choice_that_changes_no_text() -> None:
    assert default_policy((0, 3), text_invariant=True) == Cost()
    assert default_policy((0,), text_invariant=True) == Fixed(0)
    assert default_policy((0, 3), text_invariant=False) == Fixed(3)
    assert RULES["exact"].text_invariant and not RULES["rejection"].text_invariant


def test_tiers_are_timed_in_front_of_the_first_step(
    spec: Speculator, model: LlamaForCausalLM, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    SimulatedClock(lambda tier: 0.001, monkeypatch)
    assert spec.policy == Cost()
    assert spec.engine.policies.costs is None and "ms at K=3" not in spec.explain()
    prompt = random_prompt(9, 1, vocab=6)
    before = spec.arena.fingerprint()
    assert spec.generate(torch.tensor([prompt]), max_new_tokens=30)[0, 9:].tolist() == greedy(model, prompt, 30)
    assert {entry for entry in spec.arena.fingerprint() if entry[0] == "arena"} == {
        entry for entry in before if entry[0] == "arena"
    }
    assert "ms at K=0" in spec.explain() and "ms at K=3" in spec.explain()
    # Of 1, 2 and 4 rows the first and the last; the longest context with the ends of the ladder.
    timing = len([name for name in runs if not name.startswith("prefill")]) - spec.stats.steps
    assert timing == 2 * (MOST_REPEATS + 1) * (3 + 2)


def test_a_tier_can_be_fixed(spec: Speculator) -> None:
    spec.set_tier(1)
    spec.stats.reset()
    spec.generate(torch.tensor([random_prompt(9, 1, vocab=6)]), max_new_tokens=30)
    assert spec.policy == Fixed(1) and set(spec.stats.tier_steps) <= {0, 1}


def test_rules_whose_text_depends_on_the_drafts_keep_the_largest_tier(model: LlamaForCausalLM) -> None:
    with speccompile.wrap(
        model, "ngram", tiers=(0, 3), max_len=64, backend="eager", acceptance=Typical(threshold=0.2)
    ) as spec:
        assert spec.policy == Fixed(3)
        assert "by 'typical' text depends on the draft length" in spec.explain()
