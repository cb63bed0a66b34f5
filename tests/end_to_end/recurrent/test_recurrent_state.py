"""Recurrent state: after any steps it is that of plain decoding, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speccompile.graph.layer_state import ABSORBED
from speccompile.runtime.request import Request
from support.dice import Dice
from support.recurrent_targets import FAMILIES, NEW, SLOTS, TIERS, Wrapped, prompts, stepped, wrapped


def test_state_after_every_step_is_that_of_plain_decoding_bit_for_bit(target: Wrapped) -> None:
    texts, seen = prompts(SLOTS, seed=3), 0
    target.decode_plainly(texts)

    def compare(request: Request) -> None:
        nonlocal seen
        absorbed, state = target.state_of(request)
        assert all(map(torch.equal, state, target.plain[tuple(request.prompt)][absorbed]))
        seen += 1

    target.spec.engine.policy = Dice(TIERS, seed=1)
    target.spec.stats.reset()
    for request in stepped(target, texts, compare):
        assert request.new_tokens == target.expected(request.prompt)
    assert seen > NEW and 0 < target.spec.stats.accepted_tokens < target.spec.stats.draft_tokens


Move = tuple[str, int, int]
#: A request of the n-th known prompt for so many tokens, a step of the n-th tier, the n-th request is cancelled.
moves: st.SearchStrategy[list[Move]] = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 4), st.integers(1, NEW)),
        *[st.tuples(st.just("step"), st.integers(0, len(TIERS) - 1), st.integers(1, 3))] * 3,
        st.tuples(st.just("cancel"), st.integers(0, 5), st.just(0)),
    ),
    min_size=6,
    max_size=30,
)


@pytest.mark.parametrize("name", FAMILIES)
def test_state_after_any_moves_is_that_of_plain_decoding_and_of_a_fresh_prompt(name: str) -> None:
    target, known = wrapped(name), [[9], *prompts(1, seed=9)]
    engine = target.spec.engine
    # Two that go on from the end of the first one's text, one that leaves it before.
    known += [[9, *target.expected([9])[:count], *tail] for count, tail in ((NEW, [7, 8]), (9, [6]), (2, [7] * 20))]
    target.decode_plainly(known)

    reused: list[Request] = []

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(moves=moves)
    def holds(moves: list[Move]) -> None:
        target.drafter.random.seed(0)
        requests: list[Request] = []
        newest: list[tuple[list[int], list[torch.Tensor]]] = []
        for move, which, count in moves:
            if move == "submit":
                requests.append(engine.submit(known[which], max_new_tokens=count))
            elif move == "cancel" and requests:
                requests[which % len(requests)].cancel()
            elif move == "step":
                target.spec.set_tier(TIERS[which])
                for _ in range(count):
                    engine.step()
            newest = []
            for request in requests:
                if not request.finished and request.slot >= 0 and request.new_tokens:
                    absorbed, state = target.state_of(request)
                    assert all(map(torch.equal, state, target.plain[tuple(request.prompt)][absorbed]))
                    newest.append(((request.prompt + request.new_tokens)[:absorbed], state))
        engine.run()
        reused.extend(request for request in requests if request.stats.reused_tokens)
        for request in requests:
            text = target.expected(request.prompt)[: request.params.max_new_tokens]
            assert request.new_tokens == text[: len(request.new_tokens)]
            assert request.finish_reason == "cancelled" or request.new_tokens == text
        for text, state in newest[:1]:
            for found, fresh in zip(state, target.fresh_state(text), strict=True):
                torch.testing.assert_close(found, fresh)

    holds()
    assert bool(reused) == engine.prefix_reuse


def test_a_rejected_draft_that_is_not_a_number_leaves_nothing(target: Wrapped) -> None:
    texts = prompts(SLOTS, seed=6)
    bad = next(token for token in range(5, 100) if all(token not in [*p, *target.expected(p)] for p in texts))
    weight = target.model.get_input_embeddings().weight
    before, target.drafter.wrong, target.drafter.mistakes = weight[bad].clone(), [bad], 0
    with torch.no_grad():
        weight[bad] = torch.nan

    def see(request: Request) -> None:
        assert not any(tensor.isnan().any() for tensor in target.state_of(request)[1])

    try:
        for request in stepped(target, texts, see):
            assert request.new_tokens == target.expected(request.prompt)
        assert target.drafter.mistakes > 10
    finally:
        target.drafter.wrong = range(5, 100)
        with torch.no_grad():
            weight[bad] = before


def test_a_slots_new_owner_sees_nothing_of_the_one_before(target: Wrapped) -> None:
    arena, prompt = target.spec.engine.arena, prompts(1, seed=7)[0]
    for name in arena:
        if name.startswith(("conv_", "delta_", "scan_")):
            arena[name][:SLOTS].fill_(torch.nan)
    arena[ABSORBED][:SLOTS].fill_(7)
    request = target.spec.engine.submit(prompt, max_new_tokens=NEW)
    target.spec.engine.run()
    assert request.new_tokens == target.expected(prompt)
