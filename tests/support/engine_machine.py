"""Moves over an engine as a hypothesis state machine."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from support.engine_play import MAX_LEN, MAX_NEW, SPECS, TIERS, Play, prompts, reference, spec_of


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
