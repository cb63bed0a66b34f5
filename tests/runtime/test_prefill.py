"""Which chunks of prompts an engine reads, alone and between the steps of others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.runtime.prefill import FIXED_TOKENS, STEPS
from speccompile.utils.devices import TRAITS
from support.engines import greedy
from support.tiny import admitted, cancel_all, random_prompt

pytestmark = pytest.mark.usefixtures("all_prompt_widths")

MAX_LEN = 256


def wrap(model: LlamaForCausalLM, **options: Any) -> Speculator:
    """Every prompt is read."""
    return speccompile.wrap(
        model, "none", **({"tiers": (0,), "max_batch": 3, "max_len": MAX_LEN, "backend": "eager"} | options)
    )


@pytest.fixture(scope="module")
def shared(model: LlamaForCausalLM) -> Speculator:
    return wrap(model, prefill_budget=24, prefix_reuse=False)


@pytest.fixture
def spec(shared: Speculator) -> Iterator[Speculator]:
    yield shared
    cancel_all(shared.engine)


def names_by_step(spec: Speculator, runs: list[str]) -> list[list[str]]:
    """What ran, step by step, until nothing is left to do."""
    result = []
    while not spec.engine.idle:
        runs.clear()
        spec.engine.step()
        names = [name.removeprefix("prefill ").removeprefix("tier ") for name in runs]
        result.append([name.removesuffix(", inner") for name in names])
    return result


def test_while_nobody_runs_a_step_reads_one_chunk_and_runs_no_tier(spec: Speculator, runs: list[str]) -> None:
    spec.engine.submit(random_prompt(200), max_new_tokens=3)
    assert names_by_step(spec, runs) == [["T=128"], ["T=64"], ["T=8"], ["K=0, 1 row"], ["K=0, 1 row"]]


def test_a_running_request_gets_a_token_with_every_step(
    spec: Speculator, model: LlamaForCausalLM, runs: list[str]
) -> None:
    running = admitted(spec.engine, random_prompt(5, seed=1), max_new_tokens=9)
    late = spec.engine.submit(random_prompt(70, seed=2), max_new_tokens=3)
    assert names_by_step(spec, runs) == [
        ["T=16", "T=8", "K=0, 1 row"],
        ["T=16", "T=8", "K=0, 1 row"],
        ["T=16", "T=8", "K=0, 2 rows"],
        ["K=0, 2 rows"],
        *[["K=0, 1 row"]] * 4,
    ]
    for request, new in ((running, 9), (late, 3)):
        assert request.new_tokens == greedy(model, request.prompt, new)
        assert request.stats.prefill_tokens == len(request.prompt)


def test_the_budget_is_shared_by_all_prompts_of_a_step(spec: Speculator, runs: list[str]) -> None:
    admitted(spec.engine, random_prompt(5, seed=1), max_new_tokens=3)
    for seed in (2, 3):
        spec.engine.submit(random_prompt(16, seed), max_new_tokens=1)
    assert names_by_step(spec, runs) == [["T=16", "T=8", "K=0, 1 row"], ["T=8", "K=0, 1 row"]]


def test_prompts_of_generate_are_read_before_any_of_them_goes_on(spec: Speculator, runs: list[str]) -> None:
    """Their tokens are not streamed, and together they are done sooner."""
    rows = torch.tensor([random_prompt(40, seed) for seed in (4, 5, 6)])
    spec.generate(rows, max_new_tokens=3)
    assert runs == ["prefill T=32, inner", "prefill T=8"] * 3 + ["tier K=0, 3 rows"] * 2


def test_prompts_of_generate_do_not_hold_up_who_is_watched(
    spec: Speculator, model: LlamaForCausalLM, runs: list[str]
) -> None:
    watched = admitted(spec.engine, random_prompt(5, seed=1), max_new_tokens=30)
    runs.clear()
    rows = torch.tensor([random_prompt(40, seed) for seed in (4, 5)])
    spec.generate(rows, max_new_tokens=3)
    assert runs[:6] == [
        *("prefill T=16, inner", "prefill T=8, inner", "tier K=0, 1 row"),
        *("prefill T=16", "prefill T=8, inner", "tier K=0, 2 rows"),
    ]
    spec.engine.run()
    assert watched.new_tokens == greedy(model, watched.prompt, 30)


def test_without_a_budget_that_of_the_device_holds(
    model: LlamaForCausalLM, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: a prompt takes few steps, none is built to read it along, and the running request keeps going."""
    monkeypatch.setitem(TRAITS, "cpu", replace(TRAITS["cpu"], prefill_budget=128))
    spec = wrap(model, prefix_reuse=False)
    running = admitted(spec.engine, random_prompt(5, seed=1), max_new_tokens=9)
    late = spec.engine.submit(random_prompt(200, seed=2), max_new_tokens=3)
    assert not spec.engine.mixed_tiers
    assert names_by_step(spec, runs)[:3] == [
        ["T=128", "K=0, 1 row"],
        ["T=64", "T=8", "K=0, 2 rows"],
        ["K=0, 2 rows"],
    ]
    for request, new in ((running, 9), (late, 3)):
        assert request.new_tokens == greedy(model, request.prompt, new)
    assert wrap(model, prefill_budget=24).engine.prompts.budget.tokens == 24


def test_deterministic_chunks_are_the_same_alone_and_among_others(model: LlamaForCausalLM, runs: list[str]) -> None:
    spec = wrap(model, deterministic=True)
    assert spec.engine.prompts.budget.tokens == FIXED_TOKENS == 64
    text = random_prompt(150, seed=7)
    spec.engine.submit(text, max_new_tokens=2)
    alone = names_by_step(spec, runs)
    assert alone == [["T=64"], ["T=64"], ["T=32"], ["K=0, 3 rows"]]
    others = [admitted(spec.engine, random_prompt(5, seed), max_new_tokens=40) for seed in (1, 2)]
    among = spec.engine.submit(text, max_new_tokens=2)
    step = "K=0, 3 rows"
    assert names_by_step(spec, runs)[:3] == [["T=64", step], ["T=64", step], ["T=32", step]]
    assert among.new_tokens == greedy(model, text, 2)
    assert all(len(request.new_tokens) == 40 for request in others)


def test_a_measured_budget_follows_what_is_measured(
    model: LlamaForCausalLM, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = wrap(model, prefix_reuse=False)
    engine = spec.engine
    assert engine.prompts.budget.tokens is None
    running = admitted(engine, random_prompt(5, seed=1), max_new_tokens=60)
    for step_seconds, allowed in ((10.0, "T=128"), (1e-9, "T=4, inner")):
        for _ in range(STEPS):
            engine.prompts.budget.note_step(0, step_seconds)
        for width in spec.prefill:
            for _ in range(STEPS):
                engine.prompts.budget.note_chunk(width, 0.01)
        for _ in range(STEPS):
            # Reading along is no way out.
            engine.prompts.budget.note_mixed(0, 1e6)
        late = engine.submit(random_prompt(128, seed=int(step_seconds)), max_new_tokens=1)
        runs.clear()
        engine.step()
        assert runs == [f"prefill {allowed}", "tier K=0, 1 row"]
        late.cancel()
    noted: list[tuple[float, ...]] = []
    for name in ("note_step", "note_chunk"):
        monkeypatch.setattr(engine.prompts.budget, name, lambda *measured: noted.append(measured))
    engine.submit(random_prompt(4, seed=11), max_new_tokens=1)
    engine.step()
    (width, chunk_seconds), (draft_len, step_seconds) = noted
    assert (width, draft_len) == (4, 0)
    assert min(chunk_seconds, step_seconds) > 1e-6
    engine.run()
    assert running.new_tokens == greedy(model, running.prompt, 60)


def test_with_a_given_budget_no_step_that_reads_a_prompt_along_is_built(spec: Speculator) -> None:
    assert spec.engine.submit(random_prompt(5), max_new_tokens=2).result().token_ids
    assert not spec.engine.mixed_tiers
