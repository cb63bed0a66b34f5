"""The first draft of a head, chosen when a step ends, and what policies learn of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import wrap
from speccompile.errors import InvalidOption
from speccompile.heads import Eagle3Head, MtpHead
from speccompile.policies.acceptance import AcceptanceEstimator
from speccompile.policies.base import Done, Row
from speccompile.policies.cost import Cost
from speccompile.speculator import Speculator
from support.chances import survival
from support.errors import raises
from support.tiny import greedy, random_prompt

K, NEW = 3, 10
SIZES: dict[str, Any] = {"tiers": (0, K), "max_len": 64, "backend": "eager", "policy": f"fixed:{K}"}
PROMPTS = [random_prompt(8, 1), random_prompt(21, 2)]


@pytest.fixture(scope="module", params=["whole", "part", "mtp"])
def pair(request: pytest.FixtureRequest, model: LlamaForCausalLM) -> tuple[Speculator, Speculator]:
    """The same head with and without, drafting through the arena, where drafts can be read."""
    head: Any = MtpHead.random(model, 1)
    if request.param != "mtp":
        size = {"whole": 128, "part": 40}[request.param]
        head = Eagle3Head.random(model, taps=(0, 1, 1), draft_vocab_size=size)
    mode = "mtp_eagle" if request.param == "mtp" else "eagle3"
    with_first = wrap(model, mode, draft=head, confidence=True, max_batch=2, **SIZES)
    return with_first, wrap(model, mode, draft=head, max_batch=2, **SIZES)


Seen = dict[tuple[int, ...], tuple[list[int], int, float]]


def seen(spec: Speculator, prompt: list[int]) -> tuple[list[int], Seen]:
    """The text after a prompt; and by text before each step that drafted K tokens these, and what the step before said
    of the first."""
    request, found = spec.engine.submit(prompt, max_new_tokens=NEW), {}
    with_first = "first_draft" in spec.arena
    while not request.finished:
        text, slot = (*prompt, *request.new_tokens), request.slot
        drafting = bool(request.new_tokens) and request.tokens_left > K + 1
        first, chance = 0, 0.0
        if drafting and with_first:
            first, chance = int(spec.arena["first_draft"][slot]), float(spec.arena["draft_confidence"][slot])
        spec.engine.step()
        if drafting and not request.finished:
            found[text] = spec.arena["stored_drafts"][slot].tolist(), first, chance
    return request.new_tokens, found


def test_drafts_are_those_without_it_and_the_first_is_known_before(
    pair: tuple[Speculator, Speculator], model: LlamaForCausalLM
) -> None:
    for prompt in PROMPTS:
        (text, found), (expected, without) = (seen(spec, prompt) for spec in pair)
        assert text == expected == greedy(model, prompt, NEW)
        assert found.keys() == without.keys() and len(found) > 2
        for text, (drafts, first, chance) in found.items():
            assert drafts == without[text][0]
            assert first == drafts[0] and 0 < chance <= 1


def test_the_probability_is_the_head_s_own(model: LlamaForCausalLM) -> None:
    # All logits are equal, so any token is as probable as any other.
    head = Eagle3Head.random(model, taps=(0, 1, 1), draft_vocab_size=50)
    with torch.no_grad():
        head.lm_head.weight.zero_()
    with wrap(model, ["ngram", "eagle3_one_model"], draft=head, confidence=True, **SIZES | {"policy": "cost"}) as spec:
        request = spec.engine.submit(PROMPTS[0], max_new_tokens=NEW)
        while len(request.new_tokens) < 2:
            spec.engine.step()
        (row,) = spec.engine.choice.policy_inputs()
        assert row.scores == pytest.approx((0.02,)) and not row.found
        request.cancel()
        spec.engine.run()


def test_a_policy_of_rows_alone_is_not_given_any(pair: tuple[Speculator, Speculator]) -> None:
    spec = pair[0]
    request = spec.engine.submit(PROMPTS[0], max_new_tokens=NEW)
    while not request.new_tokens:
        spec.engine.step()
    assert spec.engine.choice.policy_inputs()[0].scores == ()
    policy = spec.engine.policy
    spec.engine.policy = Cost()
    assert len(spec.engine.choice.policy_inputs()[0].scores) == 1
    spec.engine.policy = policy
    request.cancel()
    spec.engine.run()


def test_the_first_chance_is_calibrated_and_later_ones_follow_by_position() -> None:
    acceptance = AcceptanceEstimator(3)
    for _ in range(200):
        # 0.9 comes true, 0.2 does not; after an accepted first draft there is one more.
        acceptance.note(Done(3, (1,), (9,), (3,), (2,), (3,), ((0.9,),)))
        acceptance.note(Done(3, (2,), (9,), (3,), (0,), (1,), ((0.2,),)))
    sure, unsure = survival(acceptance, [Row(3, 9, 3, (0.9,)), Row(3, 9, 3, (0.2,))])
    assert sure[0] > 0.9 and unsure[0] < 0.1
    assert sure[1] / sure[0] == pytest.approx(unsure[1] / unsure[0]) and sure[1] / sure[0] > 0.9
    assert sure[2] / sure[1] < 0.1


def test_it_is_yes_or_no(model: LlamaForCausalLM) -> None:
    head = Eagle3Head.random(model, taps=(0, 1, 1))
    with raises(InvalidOption, name="confidence", value="0.5"):
        wrap(model, "eagle3_one_model", draft=head, confidence="0.5", **SIZES)
