"""Prompts that are read along with the decode steps of others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.compiler.config import MIXED_TOKENS
from speccompile.passes.step.mixed import mixed_rows, with_prompt
from speccompile.runtime.prefill import CHUNKS, EXPIRY, LONGEST_WAIT_WITH_DRAFTS, STEPS, PrefillBudget
from support.engines import always_mixes, breaking, greedy
from support.plans import planned
from support.tiny import admitted, cancel_all, random_prompt

MAX_LEN = 192
TIERS = (0, 2, 7)
MODES: dict[str, dict[str, Any]] = {"none": {"tiers": (0,)}, "ngram": {}, "early_exit": {"exit_layer": 1}}


def wrap(model: LlamaForCausalLM, mode: str = "ngram", **options: Any) -> Speculator:
    sizes = {"tiers": TIERS, "max_batch": 3, "max_len": MAX_LEN, "backend": "eager"} | MODES[mode]
    policy = f"fixed:{max((sizes | options)['tiers'])}"
    spec = speccompile.wrap(model, mode, policy=policy, **(sizes | options))
    always_mixes(spec)
    return spec


@pytest.fixture(scope="module")
def shared(model: LlamaForCausalLM) -> Speculator:
    return wrap(model, prefix_reuse=False)


@pytest.fixture
def spec(shared: Speculator) -> Iterator[Speculator]:
    always_mixes(shared)
    shared.stats.reset()
    yield shared
    cancel_all(shared.engine)


# --- texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_texts_are_those_of_the_model_whoever_reads_along(model: LlamaForCausalLM, mode: str) -> None:
    spec, rng = wrap(model, mode), random.Random(0)
    engine, requests, mixed = spec.engine, [], 0
    lengths = [1, 2, 3, MIXED_TOKENS, MIXED_TOKENS + 1, MIXED_TOKENS + 2, 100, MAX_LEN - 3, 40, 70]
    for number, length in enumerate(lengths):
        # Repetitive, so that n-grams match.
        prompt = (random_prompt(min(length, 9), seed=number) * length)[:length]
        requests.append(engine.submit(prompt, max_new_tokens=rng.randint(3, 25)))
        for _ in range(rng.randint(0, 6)):
            spec.set_tier(rng.choice(list(spec.tiers)))
            engine.step()
            mixed += engine.tier.key.prompt_tokens > 0
    engine.run()
    assert mixed > 5
    spec.close()
    for request in requests:
        room = MAX_LEN - len(request.prompt)
        assert request.new_tokens == greedy(model, request.prompt, min(request.params.max_new_tokens, room))
        assert request.stats.prefill_tokens + request.stats.reused_tokens in (
            len(request.prompt) - 1,
            len(request.prompt),
        )


def test_keys_and_values_are_those_of_prompt_chunks(spec: Speculator, model: LlamaForCausalLM) -> None:
    engine, prompt = spec.engine, random_prompt(61, seed=5)
    running = admitted(engine, random_prompt(6, seed=6), max_new_tokens=80)
    reading = engine.submit(prompt, max_new_tokens=30)
    for draft_len in (*spec.tiers, *spec.tiers, *spec.tiers):
        spec.set_tier(draft_len)
        engine.step()
    engine.run()
    kv = {name: value for name, value in spec.arena.items() if name[:2] in ("k_", "v_")}
    read_along = {name: value[reading.slot, :60].clone() for name, value in kv.items()}
    assert running.finished and reading.finished
    spec.stats.reset()
    again = engine.submit(prompt, max_new_tokens=1)
    engine.run()
    assert spec.stats.prefill_passes == 1, "in one chunk, alone"
    for name, value in kv.items():
        torch.testing.assert_close(value[again.slot, :60], read_along[name], rtol=1e-4, atol=1e-5)


def test_rows_of_every_kind_take_a_prompt_along(model: LlamaForCausalLM) -> None:
    def submit(spec: Speculator, number: int) -> Any:
        drawn: dict[str, Any] = {"do_sample": True, "seed": number, "temperature": 1.5} if number % 3 else {}
        wanted: dict[str, Any] = {"logprobs": True} if number % 3 == 2 else {}
        prompt = random_prompt(10 + 17 * number, seed=number)
        return spec.engine.submit(prompt, max_new_tokens=20, **drawn, **wanted)

    with wrap(model, tiers=(0, 2), max_batch=2) as spec:
        alone = []
        for number in range(6):
            alone.append(submit(spec, number).result().token_ids)
        together = []
        for number in range(6):
            together.append(submit(spec, number))
            spec.engine.step()
            spec.engine.step()
        spec.engine.run()
        assert [request.new_tokens for request in together] == alone
        kinds = {key.sampling for key in (tier.key for tier in spec.engine.mixed_tiers.values())}
        assert kinds == {"greedy", "sampled", "scored"}


def test_a_mixed_step_that_fails_ends_its_rows_and_the_prompt(spec: Speculator, model: LlamaForCausalLM) -> None:
    engine = spec.engine
    running = admitted(engine, random_prompt(6, seed=81), max_new_tokens=30)
    half_read = engine.submit(random_prompt(60, seed=82), max_new_tokens=9)
    engine.step()
    # The first mixed step builds the tiers.
    tiers = dict(engine.mixed_tiers)
    assert tiers
    along, *waiting = [engine.submit(random_prompt(20, seed), max_new_tokens=9) for seed in (83, 84, 85)]
    breaking(engine, engine.mixed_tiers, RuntimeError("a kernel failed"), lambda _: True)
    engine.step()
    engine.table.mixed_tiers = tiers
    assert running.finish_reason == along.finish_reason == "error"
    engine.run()
    for request in (half_read, *waiting):
        assert request.new_tokens == greedy(model, request.prompt, 9)


# --- steps -------------------------------------------------------------------------------------------------------


def test_every_step_reads_along_until_the_last_token(spec: Speculator, runs: list[str]) -> None:
    engine = spec.engine
    spec.set_tier(min(spec.tiers))
    admitted(engine, random_prompt(6, seed=71), max_new_tokens=60)
    late = engine.submit(random_prompt(2 * MIXED_TOKENS + 4, seed=72), max_new_tokens=3)
    runs.clear()
    for _ in range(4):
        engine.step()
    assert runs == [*["mixed tier K=0, 1 row"] * 3, "tier K=0, 2 rows"]
    assert late.stats.prefill_tokens == len(late.prompt) - 1 and len(late.new_tokens) == 1
    assert spec.stats.prefill_tokens == 6 + len(late.prompt) - 1


def test_a_short_prompt_is_read_before_the_rest_of_a_long_one(spec: Speculator, model: LlamaForCausalLM) -> None:
    engine = spec.engine
    spec.set_tier(min(spec.tiers))
    running = admitted(engine, random_prompt(6, seed=74), max_new_tokens=60)
    long = engine.submit(random_prompt(150, seed=75), max_new_tokens=5)
    engine.step()
    short = engine.submit(random_prompt(2 * MIXED_TOKENS, seed=76), max_new_tokens=5)
    for _ in range(3):
        engine.step()
    assert short in engine.batch.rows and long.stats.prefill_tokens == 2 * MIXED_TOKENS
    engine.run()
    for request in (running, long, short):
        assert request.new_tokens == greedy(model, request.prompt, request.params.max_new_tokens)


def test_a_wider_step_has_fewer_rows_of_the_prompt(spec: Speculator) -> None:
    admitted(spec.engine, random_prompt(4), max_new_tokens=2)
    for (draft_len, rows, _), tier in spec.engine.mixed_tiers.items():
        width = draft_len + 1
        assert tier.key.prompt_tokens == MIXED_TOKENS // width * width
        assert (tier.key.rows, tier.key.width) == (rows, width)
        read = tier.stages.last.graph.values["input_tokens"].meta["val"]
        assert read.shape == (rows + MIXED_TOKENS // width, width)
        # The lm_head costs what it costs without a prompt.
        assert tier.stages.last.graph.values["logits"].meta["val"].shape[:2] == (rows, width)


def test_row_counts_leave_a_slot_to_the_prompt(model: LlamaForCausalLM) -> None:
    for max_batch, expected in ((1, ()), (2, (1,)), (3, (1, 2)), (4, (1, 2, 4)), (5, (1, 2, 4)), (6, (1, 2, 4, 6))):
        config = planned(model, "none", max_batch=max_batch, max_len=MAX_LEN, backend="eager").config
        assert config.mixed_row_counts == expected


def test_prompts_go_in_chunks_where_they_cannot_be_read_along(model: LlamaForCausalLM, runs: list[str]) -> None:
    def ran(spec: Speculator, **options: Any) -> set[str]:
        admitted(spec.engine, random_prompt(6, seed=1), max_new_tokens=80)
        runs.clear()
        spec.engine.submit(random_prompt(40, seed=2), max_new_tokens=1, **options).result()
        cancel_all(spec.engine)
        return {"mixed" if "mixed" in name else name.split()[0] for name in runs}

    with wrap(model, "none", prefix_reuse=False) as spec:
        assert "prefill" not in ran(spec)
        # The lm_head has to look at all of its prompt.
        assert ran(spec, prompt_logprobs=True) == {"prefill", "tier"}
        for _ in range(CHUNKS):
            spec.engine.prompts.budget.note_mixed(0, 1e9)
        assert ran(spec) == {"prefill", "tier"}
    with wrap(model, "none", prefill_budget=8, prefix_reuse=False) as spec:
        assert ran(spec) == {"prefill", "tier"}
    # One shape for all; a text that depends on which step reads what.
    for options in ({"deterministic": True}, {"acceptance": "typical"}):
        with wrap(model, "none", prefix_reuse=False, **options) as spec:
            assert ran(spec) == {"prefill", "tier"} and not spec.engine.mixed_tiers


def test_generate_needs_no_mixed_tiers(model: LlamaForCausalLM) -> None:
    with wrap(model, "none") as spec:
        spec.generate(torch.tensor([random_prompt(20)]), max_new_tokens=4)
        assert not spec.engine.mixed_tiers


def test_nothing_is_allocated_once_the_tiers_are_there(spec: Speculator) -> None:
    engine = spec.engine
    admitted(engine, random_prompt(6, seed=1), max_new_tokens=40)
    before = spec.arena.fingerprint()
    engine.submit(random_prompt(60, seed=2), max_new_tokens=9)
    engine.run()
    assert spec.arena.fingerprint() == before


def test_a_step_that_took_too_long_is_tried_again_later() -> None:
    budget = PrefillBudget((4, 8), None, fixed=False)
    assert budget.mixes
    budget.note_mixed(0, 3.0)
    assert budget.mixes, "what a usual step takes is not known yet"
    budget.note_step(0, 1.0)
    assert not budget.mixes
    for _ in range(EXPIRY):
        assert not budget.mixes
        budget.note_chunk(4, 0.1)
    assert budget.mixes
    budget.note_mixed(0, 1.9)
    assert budget.mixes
    # Longer than it may take, but so does what reads less.
    for _ in range(CHUNKS):
        budget.note_mixed(0, 2.5)
        budget.note_chunk(4, 1.6)
    assert budget.mixes
    for _ in range(CHUNKS):
        budget.note_chunk(4, 1.4)
    assert not budget.mixes
    assert not PrefillBudget((4, 8), 64, fixed=False).mixes
    assert not PrefillBudget((4, 8), None, fixed=True).mixes


def test_no_more_is_drafted_beside_a_prompt_than_a_step_has_time_for() -> None:
    budget, tiers = PrefillBudget((4, 8), None, fixed=False), (0, 1, 3, 7)
    budget.note_chunk(4, 0.9)
    for draft_len, seconds in ((0, 1.0), (1, 1.0), (1, 1.0), (3, 1.7), (7, 2.5)):
        budget.note_step(draft_len, seconds)
    assert [budget.mixed_draft_len(wanted, tiers) for wanted in tiers] == [0, 1, 1, 1]
    budget.note_mixed(1, LONGEST_WAIT_WITH_DRAFTS + 0.1)
    assert budget.mixed_draft_len(7, tiers) == 0
    budget.note_mixed(3, LONGEST_WAIT_WITH_DRAFTS)
    assert [budget.mixed_draft_len(wanted, tiers) for wanted in tiers] == [0, 0, 3, 3]
    for _ in range(STEPS):
        budget.note_step(7, 2.5)
    assert budget.mixed_draft_len(7, tiers) == 7, "that is the usual step now"


def test_a_step_beside_a_prompt_falls_back_to_a_smaller_tier(model: LlamaForCausalLM, runs: list[str]) -> None:
    with wrap(model, "early_exit") as spec:
        engine = spec.engine
        admitted(engine, random_prompt(6, seed=1), max_new_tokens=60)
        engine.submit(random_prompt(60, seed=2), max_new_tokens=9)
        for tier in ("K=7", "K=2"):
            runs.clear()
            engine.step()
            assert runs == [f"mixed tier {tier}, 1 row"]
            for _ in range(CHUNKS):
                engine.prompts.budget.note_mixed(7, 1e9)


# --- what the graph computes -------------------------------------------------------------------------------------


def test_prompt_rows_end_in_front_of_the_last_token() -> None:
    length = torch.tensor([5, 12, 1])
    for start, expected in ((0, [0, 4, 8]), (4, [4, 8, None]), (8, [8, None, None]), (10, [10, None, None])):
        own, slots, starts = mixed_rows(
            torch.tensor([0, 2]),
            length,
            torch.tensor([1]),
            torch.tensor([start]),
            rows=1,
            prompt_rows=3,
            width=4,
            dummy_slot=2,
        )
        assert own.tolist() == [0]
        assert slots.tolist() == [0, *(2 if first is None else 1 for first in expected)]
        assert starts.tolist() == [first or 0 for first in expected]


def test_prompt_rows_read_the_prompt_and_stay_within_the_cache() -> None:
    tokens = torch.arange(20).reshape(2, 10)
    length = torch.tensor([3, 9])
    read, positions = with_prompt(
        torch.tensor([[2, 2, 2]]),
        torch.tensor([[2, 3, 4]]),
        tokens,
        length,
        torch.tensor([0, 1, 1]),
        torch.tensor([4, 8]),
    )
    # After the prompt its last token is read.
    assert read.tolist() == [[2, 2, 2], [14, 15, 16], [18, 18, 18]]
    assert positions.tolist() == [[2, 3, 4], [4, 5, 6], [8, 9, 9]]
