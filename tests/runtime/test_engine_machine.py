"""Requests that come, go, share beginnings and change tiers in any order: what has to hold after every move."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from support.engine_machine import EngineMachine
from support.engine_play import MAX_LEN, MAX_NEW, TIERS, Play, prompts, reference, spec_of

# --- hypothesis --------------------------------------------------------------------------------------------------


def test_every_invariant_holds_whatever_requests_do() -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=10, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


# --- and 200 requests, whatever hypothesis finds worth trying ----------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "slots", "late", "pages"),
    [
        ("ngram", 1, False, None),
        ("early_exit", 2, True, None),
        ("none", 3, False, None),
        ("none", 3, True, 13),
        ("ngram", 4, True, None),
        ("ngram", 4, False, 13),
    ],
)
def test_40_requests_in_random_order(mode: str, slots: int, late: bool, pages: int | None) -> None:
    wanted = 40
    rng = random.Random(f"{mode} {slots} {late}")
    play = Play(spec_of(mode, slots, pages), late=late, max_waiting=6)
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
    assert pages is None or play.most_shared > 0
