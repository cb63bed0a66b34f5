"""Drafters that read the target's tokens only when they draft: they draft as if they had read in every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from speccompile import Speculator, Tree, wrap
from speccompile.heads import Eagle3Head
from speccompile.modes.network.catch_up import UNREAD_TOKENS, most_unread
from speccompile.runtime import scheduler, timing
from speccompile.runtime.request import Request
from support.clocks import SimulatedClock
from support.drafters import random_drafter
from support.eagle3_specs import TAPS, eagle3, plain_of, run_until, states_of
from support.tiny import admitted, cancel_all, greedy, random_prompt

K = 3
TREE = Tree.static([(0,), (1,), (0, 0)])
TINY = {"layers": 4}


@pytest.fixture(scope="module")
def head(model: LlamaForCausalLM) -> Eagle3Head:
    return Eagle3Head.random(model, taps=TAPS, draft_vocab_size=48)


@pytest.fixture(scope="module", params=["a head", "a draft model", "a fused head", "a fused draft model"])
def spec(request: pytest.FixtureRequest, model: LlamaForCausalLM, head: Eagle3Head) -> Iterator[Speculator]:
    sizes: dict[str, Any] = {"tiers": (0, K, TREE), "max_batch": 3, "max_len": 200}
    fused = "fused" in request.param
    with (
        eagle3(model, head, fused=fused, **sizes)
        if "head" in request.param
        else wrap(model, "draft_target", draft=random_drafter(), fused=fused, backend="eager", **sizes)
    ) as made:
        yield made


@pytest.fixture(scope="module")
def drafter(spec: Speculator) -> Any:
    network = spec._build.drafter.network  # type: ignore[union-attr]
    return network.module


@pytest.fixture
def runs(spec: Speculator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slot of each run that only reads."""
    catch_up, slots = spec.engine.scheduler._unread, list[int]()
    assert catch_up is not None
    run = catch_up._run

    def noted(request: Request) -> None:
        slots.append(request.slot)
        run(request)

    monkeypatch.setattr(catch_up, "_run", noted)
    return slots


def assert_next_drafts(spec: Speculator, model: LlamaForCausalLM, drafter: Any, *requests: Request) -> None:
    """Run a step with drafts, and assert that these are those of the drafter after the whole text."""
    wanted = [drafts_after(drafter, model, request.prompt + request.new_tokens) for request in requests]
    spec.set_tier(K)
    if "stored_drafts" in spec.arena:
        spec.engine.step()
        made = [spec.arena["stored_drafts"][request.slot, :K].tolist() for request in requests]
    else:
        tier, catch_up = spec.engine.tiers[K, 1, "greedy"], spec.engine.scheduler._unread
        assert catch_up is not None
        catch_up.before_step(requests, tier, [], drafts=True)
        made = [run_until(spec, request.slot, tier.graph, "drafts")[0][0].tolist() for request in requests]
        spec.engine.step()
    assert made == wanted


def drafts_after(drafter: Any, model: LlamaForCausalLM, text: list[int]) -> list[int]:
    if isinstance(drafter, Eagle3Head):
        tokens: list[int] = plain_of(drafter).draft(text, states_of(model, text), K)[0]
        return tokens
    return greedy(drafter, text, K)


def steps(spec: Speculator, tier: int, count: int) -> None:
    spec.set_tier(tier)
    for _ in range(count):
        spec.engine.step()


def test_steps_without_drafts_do_not_run_the_head(spec: Speculator) -> None:
    tiers = spec.engine.tiers
    for shape in (0, K, TREE):
        target = tiers[shape, 1, "greedy"]
        runs = any(name.startswith("drafter_") for name in target.graph.op_counts())
        assert runs == (shape != 0 and target.drafter is None)
    assert spec.engine.table.catch_up is not None
    assert spec.engine.table.catch_up.key.width == UNREAD_TOKENS == most_unread(K)


@pytest.mark.parametrize("count", [0, 4, 5, 32, 33, 70])
def test_after_steps_without_drafts(
    spec: Speculator, model: LlamaForCausalLM, drafter: Any, runs: list[int], count: int
) -> None:
    request = admitted(spec.engine, random_prompt(15, seed=count), max_new_tokens=120)
    steps(spec, 0, count)
    # The drafter's executable reads four tokens itself. Further ones are read before, a part of them as soon as the
    # arena would overwrite some.
    assert len(runs) == max(0, count - 1) // UNREAD_TOKENS
    assert_next_drafts(spec, model, drafter, request)
    assert_next_drafts(spec, model, drafter, request)
    request.cancel()
    spec.engine.step()
    assert request.result().token_ids == greedy(model, request.prompt, len(request.new_tokens))


def test_what_is_read_before_a_step_counts_in_its_time(spec: Speculator, monkeypatch: pytest.MonkeyPatch) -> None:
    catch_up = spec.engine.table.catch_up
    clock = SimulatedClock(lambda tier: 10.0 if tier is catch_up else 1.0, monkeypatch)
    for module in (scheduler, timing):
        monkeypatch.setattr(module, "time", clock)
    request = admitted(spec.engine, random_prompt(15, seed=3), max_new_tokens=40)
    steps(spec, 0, 9)
    spec.stats.reset()
    steps(spec, K, 2)
    # In the first of the two steps.
    assert int(spec.stats.tier_seconds[K]) // 10 == 1
    request.cancel()
    spec.engine.step()


def test_chains_trees_and_steps_without_drafts_in_turns(
    spec: Speculator, model: LlamaForCausalLM, drafter: Any
) -> None:
    requests = [admitted(spec.engine, random_prompt(length, seed=length), max_new_tokens=90) for length in (1, 40, 90)]
    for tier, count in ((TREE, 2), (0, 7), (TREE, 1), (K, 2), (0, 34), (TREE, 1)):
        steps(spec, tier, count)
        assert_next_drafts(spec, model, drafter, *requests)
    cancel_all(spec.engine)


def test_what_a_request_leaves_is_complete(
    spec: Speculator, model: LlamaForCausalLM, drafter: Any, runs: list[int]
) -> None:
    """Another request that goes on with its text drafts after all of it."""
    first = admitted(spec.engine, random_prompt(40, seed=77), max_new_tokens=12)
    steps(spec, 0, 11)
    assert first.finished and runs == [first.slot]
    text = first.prompt + first.new_tokens
    for prompt in ([*text, 5, 6], text):
        request = admitted(spec.engine, prompt, max_new_tokens=9)
        assert request.stats.reused_tokens >= len(text) - 3
        assert_next_drafts(spec, model, drafter, request)
        request.cancel()
        spec.engine.step()


def test_a_prompt_that_goes_on_with_a_running_text(
    spec: Speculator, model: LlamaForCausalLM, drafter: Any, runs: list[int]
) -> None:
    running = admitted(spec.engine, random_prompt(40, seed=78), max_new_tokens=60)
    steps(spec, 0, 20)
    request = admitted(spec.engine, running.prompt + running.new_tokens, max_new_tokens=9)
    assert runs == [running.slot] and request.stats.reused_tokens > 55
    assert_next_drafts(spec, model, drafter, running, request)
    cancel_all(spec.engine)


def test_a_request_that_ends_while_its_prompt_is_read(spec: Speculator, runs: list[int]) -> None:
    request = spec.engine.submit(random_prompt(30, seed=5), max_new_tokens=9)
    request.cancel()
    spec.engine.step()
    assert request.finished and not runs


def test_a_lookup_before_a_head(model: LlamaForCausalLM, head: Eagle3Head) -> None:
    """Steps with looked-up drafts do not run the head either; where it drafts again, it has read them."""
    prompt = random_prompt(9, seed=3) * 4
    sizes: dict[str, Any] = {"tiers": (0, K), "max_batch": 1, "max_len": 200, "policy": f"fixed:{K}"}
    with wrap(model, ["ngram", "eagle3_one_model"], draft=head, backend="eager", **sizes) as spec:
        assert spec.engine.table.catch_up is not None
        request = admitted(spec.engine, prompt, max_new_tokens=100)
        by_head = 0
        while not request.finished:
            text = request.prompt + request.new_tokens
            looked_up = int(spec.arena["draft_lens"][request.slot])
            room = request.params.max_new_tokens - len(request.new_tokens) - 1
            spec.engine.step()
            if not looked_up and room >= K:
                by_head += 1
                assert spec.arena["stored_drafts"][request.slot, :K].tolist() == drafts_after(head, model, text)
        assert 0 < by_head < spec.stats.steps
        assert request.new_tokens == greedy(model, prompt, 100)


def test_texts_in_compiled_steps(model: LlamaForCausalLM, head: Eagle3Head) -> None:
    """The C++ ops, in recorded steps."""
    prompt = random_prompt(20, seed=8)
    with eagle3(model, head, "eagle3", tiers=(0, K), max_batch=1, max_len=200, backend="inductor") as spec:
        request = admitted(spec.engine, prompt, max_new_tokens=80)
        for tier, count in ((0, 9), (K, 2), (0, 40)):
            steps(spec, tier, count)
            assert_next_drafts(spec, model, head, request)
        assert request.new_tokens == greedy(model, prompt, len(request.new_tokens))
