"""Policies that learn, in steps of a real engine: text, buffers, measured tiers, traces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile.errors import UnknownTier
from speccompile.policies import Cost, Done, Ema, Fixed, Upcoming
from speccompile.runtime.measure import measure_tiers
from speccompile.runtime.trace_reader import read_trace
from speccompile.tools.policy_lab.texts import texts_of
from support.engines import Bench, Make, assert_exact, prompt

TIERS = (0, 1, 3)
TINY = {}


@pytest.fixture(scope="module", params=["ngram", "early_exit"])
def bench(request: pytest.FixtureRequest, model: LlamaForCausalLM) -> Bench:
    return Bench(model, request.param, tiers=TIERS)


@pytest.fixture
def make(bench: Bench) -> Iterator[Make]:
    yield from bench.maker()


def test_timing_the_tiers_changes_no_live_state(make: Make, bench: Bench, model: LlamaForCausalLM) -> None:
    spec = make(Fixed(3))
    engine, arena = spec.engine, spec.arena
    requests = [engine.submit(prompt(6, seed), max_new_tokens=30) for seed in range(3)]
    while not all(request.new_tokens for request in requests):
        engine.step()
    dummy = arena.layout.dummy_slot
    before = {name: tensor.clone() for name, tensor in arena.items()}
    costs = measure_tiers(arena, engine.tiers)
    for name, tensor in arena.items():
        live = slice(0, dummy) if arena.layout.tensors[name].shape[:1] == (dummy + 1,) else slice(None)
        assert torch.equal(tensor[live], before[name][live]), name
    assert costs.draft_lens == TIERS
    assert {rows for rows, _ in costs.entries} == set(engine.table.row_counts)
    assert all(cost.fixed > 0 for cost in costs.entries.values())
    engine.run()
    assert_exact(model, requests)


def test_tiers_are_timed_once_and_only_if_a_policy_asks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make(Ema())
    assert spec.engine.policies.costs is None
    spec.engine.policy = Cost()
    spec.generate(torch.tensor([prompt(5)]), max_new_tokens=5)
    costs = spec.engine.policies.costs
    assert costs is not None
    spec.engine.policy = Cost(probing=0.0)
    spec.generate(torch.tensor([prompt(5)]), max_new_tokens=5)
    assert spec.engine.policies.costs is costs


def test_a_policy_of_other_tiers_is_refused_at_once(make: Make) -> None:
    spec = make(Fixed(0))
    with pytest.raises(UnknownTier):
        spec.engine.policy = Cost(candidates=(0, 7))
    assert spec.policy == Fixed(0)


class Spy:
    """A policy that writes down what it receives."""

    uses_costs = False

    def __init__(self) -> None:
        self.asked: list[Upcoming] = []
        self.seen: list[Done] = []

    def check(self, draft_lens: Any) -> None: ...

    def start(self, ladder: Any) -> Spy:
        return self

    def choose(self, upcoming: Upcoming) -> int:
        self.asked.append(upcoming)
        return 3

    def note(self, done: Done) -> None:
        self.seen.append(done)


def test_what_a_policy_is_told(make: Make) -> None:
    spy = Spy()
    # In chunks: of a step that reads a prompt along the time is not reported.
    spec = make(spy, prefill_budget=64)
    requests = [spec.engine.submit(prompt(5 + seed, seed), max_new_tokens=12) for seed in range(2)]
    spec.engine.run()
    assert len(spy.asked) == len(spy.seen) == spec.stats.steps
    for request in requests:
        steps = [
            (done.contexts[row], done.proposed[row], done.accepted[row], done.emitted[row])
            for done in spy.seen
            for row, number in enumerate(done.requests)
            if number == request.number
        ]
        at = len(request.prompt) + 1
        for context, proposed, accepted, emitted in steps:
            assert context == at and emitted == accepted + 1 and accepted <= proposed
            at += emitted
        assert at == len(request.prompt) + 12
        assert sum(step[1] for step in steps) == request.stats.draft_tokens
    for upcoming, done in zip(spy.asked, spy.seen, strict=True):
        for row, proposed in zip(upcoming.rows, done.proposed, strict=True):
            assert proposed == min(row.draft_len, done.draft_len)
        assert done.milliseconds is not None and done.milliseconds > 0


def test_a_run_is_recorded(make: Make, tmp_path: Path) -> None:
    spec = make(Fixed(3))
    with spec.record_trace(tmp_path / "run.jsonl"):
        spec.generate(torch.tensor([prompt(5)]), max_new_tokens=20)
    steps = spec.stats.steps
    spec.generate(torch.tensor([prompt(5)]), max_new_tokens=20)
    trace = read_trace(tmp_path / "run.jsonl", TIERS)
    assert len(trace.steps) == steps and trace.censored == 0
    (text,) = texts_of(trace)
    assert text.length == 19 and text.prompt == 6
