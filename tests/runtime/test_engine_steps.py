"""Steps: slots that change hands, rows that leave while others go on, and the executable that each step runs."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.errors import UnknownTier
from speccompile.runtime.request import Request
from support.dice import Dice
from support.engines import MAX_BATCH, MAX_LEN, greedy
from support.errors import raises
from support.tiny import admitted, cancel_all, random_prompt

TIERS = (0, 1, 3, 7)


def wrap(model: LlamaForCausalLM, mode: str, **options: Any) -> Speculator:
    sizes = {"tiers": TIERS, "max_batch": MAX_BATCH, "max_len": MAX_LEN, "backend": "eager", "policy": "fixed:7"}
    return speccompile.wrap(model, mode, **(sizes | options))


@pytest.fixture(scope="module", params=["ngram", "early_exit"])
def shared(request: pytest.FixtureRequest, model: LlamaForCausalLM) -> Speculator:
    # All that wait are read in one step, however long that takes; and all of each prompt is.
    return wrap(model, request.param, prefill_budget=10_000, prefix_reuse=False)


@pytest.fixture
def spec(shared: Speculator) -> Iterator[Speculator]:
    shared.set_tier(7)
    shared.stats.reset()
    yield shared
    cancel_all(shared.engine)


# --- slots -------------------------------------------------------------------------------------------------------


def test_random_comings_and_goings(spec: Speculator, model: LlamaForCausalLM, runs: list[str]) -> None:
    """Requests join whenever a slot is free, among rows at other places of their texts, while tiers and row counts
    change: each text is its own, and each step runs the smallest executable that holds its rows."""
    rng, engine = random.Random(0), spec.engine
    engine.policy = Dice(TIERS)
    to_come = [(random_prompt(rng.randint(1, 60), seed), rng.randint(1, 40)) for seed in range(25)]
    requests: list[Request] = []
    live: list[int] = []
    while to_come or not engine.idle:
        while to_come and rng.random() < 0.2:
            text, new = to_come.pop()
            requests.append(engine.submit(text, max_new_tokens=new))
        runs.clear()
        rows = len(engine.step())
        ran = [name for name in runs if not name.startswith("prefill")]
        holds = {1: 1, 2: 2, 3: 4, 4: 4}
        assert ran == ([engine.tiers[engine.tier.draft_len, holds[rows], "greedy"].name] if rows else [])
        live.append(rows)
    assert set(live) == set(range(MAX_BATCH + 1))
    assert set(spec.stats.rows_steps) == {1, 2, 4}
    assert sum(spec.stats.rows_steps.values()) == sum(spec.stats.tier_steps.values()) == spec.stats.steps
    assert len(requests) == 25
    for request in requests:
        assert request.new_tokens == greedy(model, request.prompt, request.params.max_new_tokens)


def test_finished_rows_leave_while_others_go_on(spec: Speculator, model: LlamaForCausalLM, runs: list[str]) -> None:
    engine = spec.engine
    spec.set_tier(0)
    lengths = [3, 9, 6]
    requests = [engine.submit(random_prompt(4, seed), max_new_tokens=new) for seed, new in enumerate(lengths)]
    # No row runs yet: a chunk of the first prompt, and no tier.
    assert engine.step() == []
    assert runs == ["prefill T=4"]
    runs.clear()
    live = []
    while not engine.idle:
        took_part = engine.step()
        live.append(len(took_part))
        # Rows of the next step: the running requests in order, then the dummy slot.
        slots = [request.slot for request in engine.running]
        assert spec.arena["slots"].tolist() == slots + [MAX_BATCH] * (MAX_BATCH - len(slots))
    assert live == [3] * 2 + [2] * 3 + [1] * 3
    assert runs[:2] == ["prefill T=4"] * 2
    assert runs[2:] == ["tier K=0, 4 rows"] * 2 + ["tier K=0, 2 rows"] * 3 + ["tier K=0, 1 row"] * 3
    assert [request.stats.row_steps for request in requests] == [2, 8, 5]
    for seed, (request, new) in enumerate(zip(requests, lengths, strict=True)):
        assert request.new_tokens == greedy(model, random_prompt(4, seed), new)
        assert request.finished


@pytest.mark.parametrize(("live", "rows"), [(1, 1), (3, 4)])
def test_a_dead_row_changes_no_live_state(spec: Speculator, live: int, rows: int) -> None:
    """Steps leave every slot without a live row as it was, but for the dummy: keys and values included."""
    engine = spec.engine
    former = [engine.submit(random_prompt(20, seed), max_new_tokens=2) for seed in range(MAX_BATCH)]
    engine.run()
    assert all(request.finished for request in former)
    requests = [admitted(engine, random_prompt(20, 10 + seed), max_new_tokens=60) for seed in range(live)]
    others = [slot for slot in range(MAX_BATCH) if slot not in [request.slot for request in requests]]
    per_slot = {name: tensor for name, tensor in spec.arena.items() if tensor.shape[0] == MAX_BATCH + 1}
    before = {name: tensor[others].clone() for name, tensor in per_slot.items()}
    assert before["k_0"].any()
    spec.stats.reset()
    while len(engine.running) == live:
        engine.step()
    assert spec.stats.rows_steps == {rows: spec.stats.steps} != {rows: 0}
    for name, tensor in per_slot.items():
        assert torch.equal(tensor[others], before[name]), name
    assert not spec.arena["alive"][MAX_BATCH]


# --- ends --------------------------------------------------------------------------------------------------------


def test_a_request_may_end_in_prefill(spec: Speculator, model: LlamaForCausalLM) -> None:
    engine = spec.engine
    text = random_prompt(MAX_LEN - 1, seed=6)
    eos = greedy(model, random_prompt(30, seed=7), 1)
    ends = [
        (text, 50, [], "max_len"),
        (random_prompt(30, seed=8), 1, [], "max_new_tokens"),
        (random_prompt(30, seed=7), 50, eos, "eos"),
    ]
    for given, new, ids, reason in ends:
        request = admitted(engine, given, max_new_tokens=new, eos=ids)
        assert request.finish_reason == reason
        assert request.new_tokens == greedy(model, given, 1)
        assert not engine.running
    assert spec.stats.steps == 0


# --- failures on the way -----------------------------------------------------------------------------------------


def test_a_policy_that_asks_for_what_was_not_built_leaves_the_engine_usable(
    spec: Speculator, model: LlamaForCausalLM
) -> None:
    class Wrong:
        def choose(self, live_rows: int) -> int:
            return 2

    spec.engine.policy = Wrong()
    for failures in (1, 2):
        with raises(UnknownTier, tier=2, built=re.compile("0, 1, 3, 7")):
            spec.generate(torch.tensor([random_prompt(10)]), max_new_tokens=30)
        assert spec.engine.failures == failures
    assert not spec.engine.running
    assert not spec.arena["alive"].any()
    spec.set_tier(3)
    assert spec.generate(torch.tensor([random_prompt(10)]), max_new_tokens=30)[0, 10:].tolist() == greedy(
        model, random_prompt(10), 30
    )
    assert spec.engine.failures == 0
