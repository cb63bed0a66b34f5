"""A draft model inside of the step: the text is plain decoding's, and its KV is that of the text."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PretrainedConfig

from speccompile import Speculator, wrap
from speccompile.errors import InvalidOption, ModelInTraining, PretrainedError
from support.dice import Dice
from support.drafters import PENALTIES, TIERS, drafter_kv, ragged, random_drafter, together
from support.engines import read_all
from support.errors import raises
from support.tiny import greedy, random_prompt, tiny_llama

SIZES: dict[str, Any] = {"tiers": TIERS, "max_batch": 2, "max_len": 63, "backend": "eager", "prefix_reuse": False}
#: Where neither rows nor tiers matter.
SMALL: dict[str, Any] = SIZES | {"tiers": (0, 3), "max_batch": 1}
DRAWN: dict[str, Any] = {"do_sample": True, **PENALTIES}


@pytest.fixture(scope="module")
def plain(model: LlamaForCausalLM) -> Speculator:
    return wrap(model, "none", **SIZES | {"tiers": (0,)})


@pytest.fixture(scope="module")
def by_another(model: LlamaForCausalLM) -> Speculator:
    """Three requests in four rows leave one dead."""
    return wrap(model, "draft_target", draft=random_drafter(), **SIZES | {"max_batch": 4})


@pytest.fixture(scope="module")
def by_itself(model: LlamaForCausalLM) -> Speculator:
    return wrap(model, "draft_target", draft=model, **SIZES)


@pytest.fixture(scope="module")
def split(model: LlamaForCausalLM) -> Speculator:
    return wrap(model, "draft_target", draft=random_drafter(), fused=False, **SIZES)


@pytest.fixture(params=["by_another", "by_itself", "split"])
def spec(request: pytest.FixtureRequest) -> Iterator[Speculator]:
    made: Speculator = request.getfixturevalue(request.param)
    made.set_tier(3)
    made.stats.reset()
    yield made


@pytest.fixture(scope="module")
def plain_texts(plain: Speculator) -> Callable[[int, bool], list[list[int]]]:
    """Of :func:`ragged` prompts, drawn or greedy, without drafts: written once for all drafters."""
    return functools.cache(lambda rows, drawn: together(plain, ragged(rows, rows), 24, **(DRAWN if drawn else {})))


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_text_is_that_of_plain_decoding(
    spec: Speculator, plain_texts: Callable[[int, bool], list[list[int]]], rows: int, drawn: bool
) -> None:
    spec.engine.policy = Dice(TIERS, rows)
    assert together(spec, ragged(rows, rows), 24, **(DRAWN if drawn else {})) == plain_texts(rows, drawn)


@pytest.mark.parametrize(("rule", "fused"), [("rejection", True), ("block", True), ("block", False)])
def test_rules_get_the_probabilities_that_drafts_were_drawn_from(
    model: LlamaForCausalLM, rule: str, fused: bool
) -> None:
    """Of the target itself they are its own, so every draft stays."""
    with wrap(model, "draft_target", draft=model, acceptance=rule, fused=fused, **SMALL) as spec:
        spec.set_tier(3)
        spec.generate(torch.tensor([random_prompt(30)]), max_new_tokens=33, do_sample=True, seed=1)
        assert spec.stats.acceptance_length == 4


def test_kv_behind_accepted_drafts_is_that_of_a_fresh_prompt(spec: Speculator) -> None:
    """The last of K accepted drafts was never read by the drafter while it drafted, but by what follows."""
    request = spec.engine.submit(random_prompt(20), max_new_tokens=40)
    while len(request.new_tokens) < 20:
        spec.engine.step()
    text = request.prompt + request.new_tokens
    read_all(spec, request.slot)
    kept = drafter_kv(spec, request.slot, len(text) - 1)
    request.cancel()
    fresh = spec.engine.submit(text, max_new_tokens=2)
    while not fresh.new_tokens:
        spec.engine.step()
    torch.testing.assert_close(kept, drafter_kv(spec, fresh.slot, len(text) - 1), atol=1e-4, rtol=1e-4)
    fresh.cancel()


@pytest.mark.parametrize("options", [{}, DRAWN], ids=["greedy", "sampled"])
def test_fused_and_split_draft_the_same(by_another: Speculator, split: Speculator, options: dict[str, Any]) -> None:
    """Step by step, at any tier; so is the drafter's KV of the text."""
    prompt, dice = random_prompt(37, seed=8), Dice(TIERS, 4)
    requests = [spec.engine.submit(prompt, max_new_tokens=25, seed=2, **options) for spec in (by_another, split)]
    while not all(request.finished for request in requests):
        draft_len, kept = dice.choose(1), []
        for spec, request in zip((by_another, split), requests, strict=True):
            spec.set_tier(draft_len)
            spec.engine.step()
            read_all(spec, request.slot)
            kept.append(drafter_kv(spec, request.slot, request.cached))
        assert requests[0].new_tokens == requests[1].new_tokens
        if not requests[0].finished:
            torch.testing.assert_close(*kept, atol=1e-4, rtol=1e-4)
    assert requests[0].stats == requests[1].stats
    assert split.tiers[3].drafter is not None and by_another.tiers[3].drafter is None


def test_a_split_drafter_drafts_in_executables_of_its_own(split: Speculator) -> None:
    without_drafts = [tier for (draft_len, *_), tier in split.engine.tiers.items() if draft_len == 0]
    assert all(tier.drafter is None for tier in [*without_drafts, *split.engine.prefill_tiers.values()])
    for draft_len, tier in split.tiers.items():
        assert "drafter_decoder_layer" not in tier.stages.last.op_counts
        if draft_len:
            assert tier.drafter is not None
            drafts = tier.drafter.stages.last
            # One more forward over what it has not read.
            assert drafts.op_counts["drafter_decoder_layer"] == draft_len + 1
            assert not any(name.startswith("decoder_layer") for name in drafts.op_counts)
            assert not any(name.startswith(("k_", "v_", "model_")) for name in drafts.graph.ports)


def test_twenty_steps_without_drafts_change_no_draft(spec: Speculator) -> None:
    prompt, found = random_prompt(12, seed=4), []
    for before in (0, 3):
        spec.set_tier(before)
        request = spec.engine.submit(prompt, max_new_tokens=50)
        if before:
            while len(request.new_tokens) < 17:
                spec.engine.step()
            # To the very place, one by one.
            spec.set_tier(0)
        while len(request.new_tokens) < 21:
            spec.engine.step()
        spec.set_tier(3)
        spec.engine.step()
        # What stands at the drafts' places was computed from the drafts.
        found.append((request.new_tokens, drafter_kv(spec, request.slot, len(prompt) + 21 - 1 + 4)))
        request.cancel()
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-4)


def test_a_short_drafter_under_a_long_target(model: LlamaForCausalLM) -> None:
    """Rows after its last place go on without drafts, one by one, beside others that have some."""
    drafter, new_tokens = tiny_llama(max_positions=32), (50, 29, 20)
    with wrap(model, "draft_target", draft=drafter, **SIZES | {"tiers": (0, 3), "max_len": 95}) as spec:
        spec.set_tier(3)
        assert spec.arena["drafter_k_0"].shape[1] == 32 + 4 and spec.arena["k_0"].shape[1] == 95 + 4
        # One that gets there, one that is there from the start, and one that never does.
        prompts = [random_prompt(count, seed=count) for count in (20, 66, 7)]
        requests = [
            spec.engine.submit(prompt, max_new_tokens=new) for prompt, new in zip(prompts, new_tokens, strict=True)
        ]
        proposed: dict[int, set[int]] = {index: set() for index in range(3)}
        while not all(request.finished for request in requests):
            lengths = [len(request.prompt) + len(request.new_tokens) for request in requests]
            ran = spec.engine.step()
            for index, request in enumerate(requests):
                if request in ran and not request.finished:
                    drafts = int(spec.arena["proposed"][request.slot])
                    room = request.params.max_new_tokens - (lengths[index] - len(request.prompt)) - 1
                    assert drafts == max(0, min(3, 32 - 1 - lengths[index], room))
                    proposed[index].add(drafts)
        assert 3 in proposed[0] and 0 in proposed[0] and proposed[1] == {0} and 3 in proposed[2]
        for request, new in zip(requests, new_tokens, strict=True):
            assert request.new_tokens == greedy(model, request.prompt, new)


def test_its_length_can_be_given(model: LlamaForCausalLM) -> None:
    with wrap(model, "draft_target", draft=model, draft_max_len=32, **SMALL) as spec:
        assert spec.arena["drafter_k_0"].shape[1] == 32 + 4


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({}, "draft", "give a transformers model"),
        ({"draft": 3}, "draft", "give a transformers model"),
        ({"draft": "self:int4"}, "draft", "give a transformers model"),
        ({"draft": tiny_llama(vocab=300)}, "draft", "its vocabulary has 300 tokens and the target's 128"),
        ({"draft": tiny_llama(), "draft_max_len": 1}, "draft_max_len", "at least 2"),
        ({"draft": tiny_llama(), "fused": 0}, "fused", "use True or False"),
    ],
)
def test_what_cannot_draft_is_refused(model: LlamaForCausalLM, options: dict[str, Any], name: str, reason: str) -> None:
    with raises(InvalidOption, name=name, reason=re.compile(reason)):
        wrap(model, "draft_target", **SIZES, **options)


def test_a_draft_model_in_training_is_refused(model: LlamaForCausalLM) -> None:
    with raises(ModelInTraining, model="LlamaForCausalLM"):
        wrap(model, "draft_target", **SIZES, draft=tiny_llama().train())


def test_a_repository_that_cannot_be_reached_is_asked_for_once(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(url: str) -> None:
        raise OSError("no network")

    monkeypatch.setattr("speccompile.utils.hub.get_hf_file_metadata", no_network)
    monkeypatch.setattr(PretrainedConfig, "get_config_dict", lambda *_: pytest.fail("it is tried for half a minute"))
    with raises(PretrainedError, source="nobody/nothing", reason=re.compile("the hub cannot be reached")):
        wrap(model, "draft_target", draft="nobody/nothing", **SMALL)


def test_no_such_folder(model: LlamaForCausalLM, tmp_path: Any) -> None:
    with pytest.raises(PretrainedError):
        wrap(model, "draft_target", draft=str(tmp_path / "nothing"), **SIZES)
