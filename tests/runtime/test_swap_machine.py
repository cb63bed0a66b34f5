"""Any tier after any other, chosen by anybody, at any step and in any state of the batch: text stays and nothing moves.

With every kind of drafter, and rows that want few drafts or none.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from speccompile.policies import Cost, Ema, Fixed, Gate, Schedule, ScheduleUpTo
from support.engine_machine import EngineMachine
from support.engine_play import MAX_NEW, TIERS, Play, prompts, reference, spec_of

# (mode, slots, options), built once.
SWAPPED: tuple[tuple[str, int, dict[str, int]], ...] = (
    ("ngram", 4, {}),
    ("early_exit", 3, {}),
    ("suffix", 3, {"max_depth": 6, "remember": 60}),
    ("suffix+ngram", 4, {"max_depth": 6}),
)


class Turncoat:
    """A policy that asks for one tier after the other."""

    def __init__(self, order: list[int]) -> None:
        self._order, self._asked = order, 0

    def choose(self, live_rows: int) -> int:
        self._asked += 1
        return self._order[self._asked % len(self._order)]


policies: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([Cost(), Cost(probing=1.0), Ema(warmup=0, interval=1), Gate(0.9, 2, 3), Gate(0.1, 1, 1, 1)]),
    st.builds(Fixed, st.sampled_from(TIERS)),
    st.sampled_from([Schedule(((1, 3), (2, 0), (3, 1))), ScheduleUpTo(((1, 3), (2, 1)))]),
    st.builds(Turncoat, st.lists(st.sampled_from(TIERS), min_size=1, max_size=5)),
)


class SwapMachine(EngineMachine):
    #: By request, ``num_draft_tokens`` of those that said how many.
    limits: dict[int, int]

    @initialize(
        which=st.sampled_from(SWAPPED),
        late=st.booleans(),
        max_waiting=st.sampled_from([1, 1024]),
        prefill_budget=st.sampled_from([8, None]),
    )
    def begin(  # type: ignore[override]
        self, which: tuple[str, int, dict[str, int]], late: bool, max_waiting: int, prefill_budget: int | None
    ) -> None:
        mode, slots, options = which
        spec = spec_of(mode, slots, **options)
        self.play = Play(spec, late=late, max_waiting=max_waiting, prefill_budget=prefill_budget)
        self.limits = {}

    @rule(policy=policies)
    def change_policy(self, policy: Any) -> None:
        self.play.spec.engine.policy = policy

    @rule(data=st.data(), count=st.integers(1, 4), limit=st.sampled_from([0, 0, 1, 2, 3]))
    def submit_several(self, data: st.DataObject, count: int, limit: int) -> None:
        for prompt in data.draw(st.lists(st.sampled_from(prompts()), min_size=count, max_size=count), "prompts"):
            before = len(self.play.known)
            if self.play.submit(prompt, MAX_NEW, num_draft_tokens=limit):
                self.limits[before] = limit

    @precondition(lambda self: self.play.known)
    @rule(data=st.data())
    def swap_before_every_step(self, data: st.DataObject) -> None:
        """A tier of its own for each of the next steps."""
        for draft_len in data.draw(st.lists(st.sampled_from(TIERS), min_size=2, max_size=8), "tiers"):
            self.play.spec.set_tier(draft_len)
            self.play.step()
            self.play.check()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "play"):
            for number, limit in self.limits.items():
                stats = self.play.known[number].request.stats
                assert stats.draft_tokens <= limit * stats.row_steps and not any(stats.proposed_at[limit:])


def test_every_invariant_holds_whatever_tier_is_next() -> None:
    run_state_machine_as_test(
        SwapMachine,
        settings=settings(
            max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize(("mode", "slots", "options"), SWAPPED, ids=[mode for mode, _, _ in SWAPPED])
def test_every_tier_after_every_other(mode: str, slots: int, options: dict[str, int]) -> None:
    """Each ordered pair of tiers, with one to all rows alive."""
    play = Play(spec_of(mode, slots, **options))
    pairs = [(before, after) for before in TIERS for after in TIERS]
    texts = iter(prompts() * 20)
    seen: set[tuple[int, int, int]] = set()
    for rows in range(1, slots + 1):
        for before, after in pairs:
            while len(play.unfinished) < rows:
                prompt = next(text for text in texts if len(reference(text)) == MAX_NEW)
                play.submit(prompt, MAX_NEW)
            for draft_len in (before, after):
                play.spec.set_tier(draft_len)
                play.step()
                play.check()
            seen.add((before, after, len(play.engine.running)))
    assert {pair[:2] for pair in seen} == set(pairs)
    play.drain()
