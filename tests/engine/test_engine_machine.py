"""Requests that come, go, share beginnings and change tiers in any order: what has to hold after every move."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from play import MAX_LEN, MAX_NEW, SPECS, TIERS, Play, prompts, reference, spec_of

# --- hypothesis --------------------------------------------------------------------------------------------------


class EngineMachine(RuleBasedStateMachine):
    play: Play

    @initialize(
        which=st.sampled_from(SPECS),
        late=st.booleans(),
        max_waiting=st.sampled_from([0, 1, 3, 1024]),
        prefill_budget=st.sampled_from([8, 24, None]),
    )
    def begin(self, which: tuple[str, int], late: bool, max_waiting: int, prefill_budget: int | None) -> None:
        self.play = Play(spec_of(*which), late=late, max_waiting=max_waiting, prefill_budget=prefill_budget)

    @rule(data=st.data(), max_new_tokens=st.integers(1, MAX_NEW), priority=st.sampled_from([0, 0, 0, 1, -1]))
    def submit(self, data: st.DataObject, max_new_tokens: int, priority: int) -> None:
        prompt = data.draw(st.sampled_from(prompts()), "prompt")
        eos = data.draw(st.lists(st.sampled_from(reference(prompt)), max_size=2, unique=True), "eos")
        listen = data.draw(st.booleans(), "listen")
        cancel_at = data.draw(st.none() | st.integers(1, 6), "cancel_at") if listen else None
        self.play.submit(prompt, max_new_tokens, eos, priority, listen, cancel_at)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.play.step()
            self.play.check()

    @precondition(lambda self: self.play.known)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.play.cancel(data.draw(st.sampled_from(self.play.unfinished or self.play.known), "request"))

    @precondition(lambda self: self.play.known)
    @rule(data=st.data(), by_stream=st.booleans())
    def finish(self, data: st.DataObject, by_stream: bool) -> None:
        self.play.finish(data.draw(st.sampled_from(self.play.unfinished or self.play.known), "request"), by_stream)

    @rule(draft_len=st.sampled_from(TIERS))
    def swap(self, draft_len: int) -> None:
        self.play.spec.set_tier(draft_len)

    @rule(data=st.data(), max_new_tokens=st.integers(1, 6))
    def generate(self, data: st.DataObject, max_new_tokens: int) -> None:
        short = [prompt for prompt in prompts() if len(prompt) + max_new_tokens <= MAX_LEN]
        chosen = data.draw(st.lists(st.sampled_from(short), min_size=1, max_size=self.play.slots), "prompts")
        self.play.generate(chosen, max_new_tokens)

    @invariant()
    def holds(self) -> None:
        self.play.check()

    def teardown(self) -> None:
        if hasattr(self, "play"):
            self.play.drain()


def test_machine() -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


# --- and 500 requests, whatever hypothesis finds worth trying ----------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "slots", "late", "wanted"),
    [
        ("ngram", 1, False, 60),
        ("ngram", 1, True, 65),
        ("early_exit", 2, False, 60),
        ("early_exit", 2, True, 65),
        ("none", 3, False, 60),
        ("none", 3, True, 65),
        ("ngram", 4, False, 60),
        ("ngram", 4, True, 65),
    ],
)
def test_500_requests_in_random_order(mode: str, slots: int, late: bool, wanted: int) -> None:
    rng = random.Random(f"{mode} {slots} {late}")
    play = Play(spec_of(mode, slots), late=late, max_waiting=6)
    moves = {"submit": 30, "step": 60, "cancel": 4, "finish": 3, "swap": 4, "generate": 2}
    while len(play.known) < wanted:
        match rng.choices(list(moves), list(moves.values()))[0]:
            case "submit":
                prompt = rng.choice(prompts())
                eos = rng.sample(reference(prompt), 1) if rng.random() < 0.3 else []
                cancel_at = rng.randint(1, 6) if rng.random() < 0.1 else None
                listen = cancel_at is not None or rng.random() < 0.5
                play.submit(prompt, rng.randint(1, MAX_NEW), eos, rng.choice((0, 0, 1)), listen, cancel_at)
            case "step":
                play.step()
            case "cancel" if play.unfinished:
                play.cancel(rng.choice(play.unfinished))
            case "finish" if play.unfinished:
                play.finish(rng.choice(play.unfinished), rng.random() < 0.5)
            case "swap":
                play.spec.set_tier(rng.choice(TIERS))
            case "generate":
                short = [prompt for prompt in prompts() if len(prompt) <= MAX_LEN - 6]
                play.generate(rng.choices(short, k=rng.randint(1, play.slots)), rng.randint(1, 6))
        play.check()
    play.drain()
    assert len(play.known) == wanted
    # Beginnings were found.
    reused = [known for known in play.known if known.request.stats.reused_tokens]
    assert len(reused) > wanted // 8
    ends = [known.request.finish_reason for known in play.known]
    assert {"eos", "max_new_tokens", "cancelled"} <= set(ends)
