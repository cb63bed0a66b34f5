"""Draft lengths per sequence: rows that want none, rows that have none, and what is reported of them."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.errors import InvalidOption
from support.errors import raises
from support.tiny import greedy, random_prompt

ROWS = 8
NEW = 24
TINY = {}


@pytest.fixture(scope="module", params=["ngram", "early_exit"])
def spec(request: pytest.FixtureRequest, model: LlamaForCausalLM) -> Speculator:
    sizes = {"tiers": (0, 1, 3), "max_batch": ROWS, "max_len": 64}
    return speccompile.wrap(model, request.param, backend="eager", policy="fixed:3", **sizes)


def prompts() -> list[list[int]]:
    """Every other one repeats itself, so that something is found; of the others nothing occurs twice."""
    repeats = [random_prompt(4, seed) * 3 for seed in range(ROWS // 2)]
    return [text for seed, text in enumerate(repeats) for text in (text, list(range(40 + seed, 52 + seed)))]


@pytest.mark.parametrize("limits", [[None, 0, 1, 2, 3, 0, None, 1], [0] * ROWS], ids=str)
def test_rows_of_different_lengths(spec: Speculator, model: LlamaForCausalLM, limits: list[int | None]) -> None:
    spec.stats.reset()
    engine = spec.engine
    requests = [
        engine.submit(prompt, max_new_tokens=NEW, num_draft_tokens=limit)
        for prompt, limit in zip(prompts(), limits, strict=True)
    ]
    proposed: dict[int, set[int]] = {row: set() for row in range(ROWS)}
    while not engine.idle:
        for request in engine.step():
            if request.stats.row_steps and not request.finished:
                proposed[requests.index(request)].add(int(spec.arena["proposed"][request.slot]))
    for prompt, limit, request, lengths in zip(prompts(), limits, requests, proposed.values(), strict=True):
        assert request.new_tokens == greedy(model, prompt, NEW)
        assert max(lengths) <= (3 if limit is None else limit)
        assert (request.stats.draft_tokens > 0) <= (limit != 0)
    if set(limits) == {0}:
        assert spec.stats.no_proposal_steps == spec.stats.steps
        assert spec.stats.draft_tokens == 0
    else:
        assert spec.stats.no_proposal_steps < spec.stats.steps
        assert spec.stats.rejected_tokens == spec.stats.draft_tokens - spec.stats.accepted_tokens
    assert sum(spec.stats.tier_seconds.values()) > 0
    assert set(spec.stats.tier_seconds) == set(spec.stats.tier_steps)


def test_a_drafter_that_has_proposed_needs_no_width_for_who_wants_none(model: LlamaForCausalLM) -> None:
    spec = speccompile.wrap(model, "ngram", tiers=(0, 1, 3), max_len=64, backend="eager", policy="fixed:3")
    prompt = random_prompt(4, 0) * 3
    spec.generate(torch.tensor([prompt]), max_new_tokens=NEW, num_draft_tokens=1)
    assert set(spec.stats.tier_steps) <= {0, 1}
    spec.stats.reset()
    spec.generate(torch.tensor([prompt]), max_new_tokens=NEW, num_draft_tokens=0)
    assert set(spec.stats.tier_steps) == {0}


def test_nor_does_one_that_drafts_inside_of_the_step(model: LlamaForCausalLM) -> None:
    sizes = {"tiers": (0, 1, 3), "max_batch": 2, "max_len": 64}
    spec = speccompile.wrap(model, "early_exit", backend="eager", policy="fixed:3", **sizes)
    prompt = random_prompt(12, 0)
    for limits, smallest in (((0, 0), 0), ((1, 0), 1), ((2, 0), 3), ((None, 0), 3)):
        spec.stats.reset()
        requests = [spec.engine.submit(prompt, max_new_tokens=NEW, num_draft_tokens=limit) for limit in limits]
        while not any(request.finished for request in requests):
            spec.engine.step()
        assert set(spec.stats.tier_steps) == {smallest}
        spec.engine.run()


def test_a_slot_forgets_the_limit_of_its_former_owner(spec: Speculator) -> None:
    prompt = torch.tensor([random_prompt(4, 0) * 3])
    spec.generate(prompt, max_new_tokens=NEW, num_draft_tokens=0)
    spec.stats.reset()
    spec.generate(prompt, max_new_tokens=NEW)
    assert spec.stats.draft_tokens > 0


@pytest.mark.parametrize("value", [-1, 4, 1.0, True, "3"])
def test_limits_that_are_refused(spec: Speculator, value: object) -> None:
    with raises(InvalidOption, name="num_draft_tokens", reason=re.compile(r"int in 0 \.\. 3")):
        spec.engine.submit([1, 2, 3], num_draft_tokens=value)  # type: ignore[arg-type]
    with raises(InvalidOption, name="num_draft_tokens"):
        spec.generate(torch.tensor([[1, 2, 3]]), num_draft_tokens=value)  # type: ignore[arg-type]
