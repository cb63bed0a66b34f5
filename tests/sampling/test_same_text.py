"""The rule ``exact``: what is drawn depends on seed and options, and on nothing that speculation does."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.errors import InvalidOption, RequestFailed, UndecidedLogits
from speccompile.modes import registry
from speccompile.runtime.request import Request
from support.dice import Dice
from support.errors import raises
from support.sampling_modes import Random
from support.sampling_options import CHOICES, options_of

VOCAB = 128
MODES: dict[str, dict[str, Any]] = {"ngram": {}, "early_exit": {"exit_layer": 1}, "random_drafts": {}}


@pytest.fixture(scope="module")
def specs(model: LlamaForCausalLM) -> Iterator[dict[str, Speculator]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_modes", dict(registry._modes) | {"random_drafts": Random})
        sizes: dict[str, Any] = {"tiers": (0, 1, 3), "max_batch": 2, "max_len": 63, "backend": "eager"}
        yield {mode: wrap(model, mode, sampling=True, **sizes, **options) for mode, options in MODES.items()}


def decided(options: dict[str, Any]) -> dict[str, Any]:
    """Without what may leave two tokens of nearly half the mass each: which of them is the more typical one rounding
    decides, and that depends on the number of rows and of drafts under the eager backend."""
    cuts = {"top_k", "top_p", "min_p"} if "typical_p" in options else set()
    return {name: value for name, value in options.items() if name not in cuts}


@given(data=st.data())
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_text_in_every_mode_at_every_tier_alone_and_among_others(
    specs: dict[str, Speculator], data: st.DataObject
) -> None:
    prompts = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=40), min_size=3, max_size=3))
    options = [decided(data.draw(options_of(list(CHOICES)))) for _ in prompts]
    seeds = [data.draw(st.integers(0, 2**63 - 1)) for _ in prompts]
    asked = [
        {"ids": ids, "do_sample": True, "seed": seed, "max_new_tokens": 16, "eos_token_id": [7]} | extra
        for ids, extra, seed in zip(prompts, options, seeds, strict=True)
    ]
    plain = specs["ngram"]
    plain.set_tier(0)
    expected = [outcome(plain.engine.submit(**request)) for request in asked]
    # Each example has every mode and every tier; their pairs are drawn.
    tiers = data.draw(st.permutations([0, 1, 3]))
    for tier, spec in zip(tiers, specs.values(), strict=True):
        spec.set_tier(tier)
        alone = data.draw(st.integers(0, 2))
        assert outcome(spec.engine.submit(**asked[alone])) == expected[alone]
        spec.engine.policy = Dice([0, 1, 3], data.draw(st.integers(0, 99)))
        together = [spec.engine.submit(**request) for request in asked]
        assert [outcome(request) for request in together] == expected


def outcome(request: Request) -> tuple[list[int], str]:
    """Its tokens and how it ended: options that leave no token at all (forced EOS, and suppressed) end it early."""
    with contextlib.suppress(RequestFailed):
        request.result()
    return request.new_tokens, request.finish_reason


def test_plain_decoding_draws_the_same(specs: dict[str, Speculator], model: LlamaForCausalLM) -> None:
    """Mode ``none`` has tiers, and no proposals."""
    request: dict[str, Any] = {"ids": [1, 2, 3, 1, 2], "do_sample": True, "seed": 6, "max_new_tokens": 24}
    specs["ngram"].set_tier(3)
    expected = specs["ngram"].engine.submit(**request).result().token_ids
    with wrap(model, "none", tiers=(0, 3), max_batch=2, max_len=63, backend="eager") as spec:
        for draft_len in (0, 3):
            spec.set_tier(draft_len)
            assert spec.engine.submit(**request).result().token_ids == expected


def test_drafts_are_accepted_and_rejected(specs: dict[str, Speculator]) -> None:
    """Or the test above would say nothing."""
    for mode, spec in specs.items():
        spec.set_tier(3)
        spec.stats.reset()
        ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]] * 8)
        spec.generate(ids, max_new_tokens=55, do_sample=True, seed=1, temperature=0.2, top_k=4)
        rate = spec.stats.acceptance_length
        assert 1 < rate < 4, (mode, rate)


def test_a_drafter_that_is_the_target_draws_what_the_target_draws(model: LlamaForCausalLM) -> None:
    """Same noise, same pipeline: every draft is accepted, whatever the temperature."""
    with wrap(
        model,
        "early_exit",
        exit_layer=2,
        tiers=(0, 3),
        max_len=63,
        backend="eager",
        policy="fixed:3",
        prefix_reuse=False,
    ) as spec:
        for options in ({}, {"temperature": 3.0, "top_p": 0.7, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2}):
            spec.stats.reset()
            spec.generate(torch.tensor([[1, 2, 3]]), do_sample=True, seed=5, max_new_tokens=41, **options)
            assert spec.stats.acceptance_length == 4


def test_greedy_neighbours_keep_their_greedy_text(specs: dict[str, Speculator], model: LlamaForCausalLM) -> None:
    spec = specs["early_exit"]
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    ids = torch.tensor([prompt])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)[0, 8:]
    greedy = spec.engine.submit(prompt, max_new_tokens=30)
    drawn = [spec.engine.submit(prompt, max_new_tokens=30, do_sample=True, seed=seed) for seed in (1, 2)]
    assert greedy.result().token_ids == expected.tolist()
    assert drawn[0].result().token_ids != drawn[1].result().token_ids


def test_greedy_requests_run_greedy_executables(specs: dict[str, Speculator]) -> None:
    engine = specs["ngram"].engine
    drawn = engine.submit([1, 2, 3], max_new_tokens=5, do_sample=True, seed=1)
    greedy = engine.submit([1, 2, 3], max_new_tokens=20)
    kinds = []
    while not greedy.finished:
        if engine.step():
            kinds.append((engine.tier.key.sampling, drawn.finished))
    assert ("greedy", True) in kinds and ("sampled", False) in kinds
    assert ("greedy", False) not in kinds


def test_temperature_0_is_greedy(specs: dict[str, Speculator]) -> None:
    spec = specs["ngram"]
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(spec.generate(ids, do_sample=True, temperature=0, top_p=0.3), spec.generate(ids))


def test_rows_of_generate_draw_differently_and_each_as_alone(specs: dict[str, Speculator]) -> None:
    spec = specs["ngram"]
    ids = torch.tensor([[1, 2, 3, 4]])
    rows = spec.generate(ids, do_sample=True, seed=40, num_return_sequences=3, max_new_tokens=12, eos_token_id=[])
    assert len({tuple(row) for row in rows.tolist()}) == 3
    for index, row in enumerate(rows):
        alone = spec.generate(ids, do_sample=True, seed=40 + index, max_new_tokens=12, eos_token_id=[])
        assert torch.equal(alone[0], row)


def test_without_a_seed_torchs_generator_gives_one(specs: dict[str, Speculator]) -> None:
    spec = specs["ngram"]
    ids = torch.tensor([[1, 2, 3, 4]])
    torch.manual_seed(3)
    first, second = (spec.generate(ids, do_sample=True, max_new_tokens=20) for _ in range(2))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    spec.generate(ids)
    assert torch.equal(torch.get_rng_state(), state), "greedy decoding draws nothing"
    assert torch.equal(spec.generate(ids, do_sample=True, max_new_tokens=20), first)
    assert not torch.equal(first[:, : second.shape[1]], second[:, : first.shape[1]])


def test_a_reused_slot_knows_nothing_of_its_former_owners_options(specs: dict[str, Speculator]) -> None:
    spec = specs["ngram"]
    ids = torch.tensor([[1, 2, 3, 4]] * 3)
    expected = spec.generate(ids, do_sample=True, seed=9, temperature=0.8, top_k=0)
    strange = {
        "logit_bias": {5: 9.0}, "suppress_tokens": list(range(64)), "bad_words_ids": [[70], [1, 2]], "top_p": 0.1,
        "no_repeat_ngram_size": 1, "forced_eos_token_id": 100, "presence_penalty": 2.0, "begin_suppress_tokens": [80],
    }  # fmt: skip
    spec.generate(ids, do_sample=True, seed=1, max_new_tokens=20, **strange)
    assert torch.equal(spec.generate(ids, do_sample=True, seed=9, temperature=0.8, top_k=0), expected)
    assert not any((spec.arena["bias_ids"] != -1).flatten())


def test_a_request_that_forbids_everything_ends_alone(specs: dict[str, Speculator]) -> None:
    for spec in specs.values():
        spec.set_tier(3)
        prompt = [1, 2, 3, 1, 2, 3]
        other = spec.engine.submit(prompt, max_new_tokens=20, do_sample=True, seed=2)
        bad = spec.engine.submit(prompt, suppress_tokens=list(range(VOCAB)))
        with raises(RequestFailed, reason=re.compile("forbid every token")) as caught:
            bad.result()
        assert isinstance(caught.value.__cause__, UndecidedLogits)
        text = other.result().token_ids
        assert text == spec.engine.submit(prompt, max_new_tokens=20, do_sample=True, seed=2).result().token_ids


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, "1"])
def test_a_seed_must_be_an_int_in_range(specs: dict[str, Speculator], seed: Any) -> None:
    with raises(InvalidOption, name="seed", reason=re.compile(r"it must be an int in 0 \.\. 9223372036854775807")):
        specs["ngram"].generate(torch.tensor([[1]]), do_sample=True, seed=seed)


def test_numbers_of_numpy_are_numbers(specs: dict[str, Speculator]) -> None:
    engine = specs["ngram"].engine
    options: dict[str, Any] = {
        "max_new_tokens": 6, "priority": 1, "seed": 7, "temperature": 0.5, "top_k": 9, "no_repeat_ngram_size": 3,
        "suppress_tokens": [4, 5], "logit_bias": {3: 1.5}, "bad_words_ids": [[1, 2]], "eos_token_id": 2,
        "num_draft_tokens": 2, "do_sample": True,
    }  # fmt: skip
    theirs: dict[str, Any] = {
        "max_new_tokens": np.int64(6), "priority": np.int8(1), "seed": np.uint64(7), "temperature": np.float32(0.5),
        "top_k": np.int32(9), "no_repeat_ngram_size": np.int64(3), "suppress_tokens": [np.int64(4), np.int32(5)],
        "logit_bias": {np.int64(3): np.float64(1.5)}, "bad_words_ids": [[np.int64(1), np.int64(2)]],
        "eos_token_id": np.int64(2), "num_draft_tokens": np.int64(2), "do_sample": np.bool_(True),
    }  # fmt: skip
    requests = [engine.submit([1, 2, 3, 1, 2], **given) for given in (options, theirs)]
    assert requests[0].params == requests[1].params
    assert requests[0].result().token_ids == requests[1].result(timeout=np.float32(60)).token_ids
    for name, wrong in {"max_new_tokens": np.float32(6), "temperature": np.bool_(True), "top_k": np.float64(3)}.items():
        with raises(InvalidOption, where="submit", name=name):
            engine.submit([1, 2, 3, 1, 2], **options | {name: wrong})


def test_a_seed_does_nothing_to_greedy_text(specs: dict[str, Speculator]) -> None:
    """Callers may give one to all of their requests."""
    engine = specs["ngram"].engine
    texts = [engine.submit([1, 2, 3, 1, 2], max_new_tokens=8, **seed).result().token_ids for seed in ({}, {"seed": 1})]
    cold = engine.submit([1, 2, 3, 1, 2], max_new_tokens=8, seed=2, do_sample=True, temperature=0.0).result().token_ids
    assert texts[0] == texts[1] == cold


def test_the_first_request_that_draws_builds_what_it_needs(model: LlamaForCausalLM) -> None:
    with wrap(model, "ngram", tiers=(0, 1), max_len=64, backend="eager") as spec:
        assert {kind for _, _, kind in spec.engine.tiers} == {"greedy"}
        places = {name: tensor.data_ptr() for name, tensor in spec.arena.items()}
        spec.generate(torch.tensor([[1, 2]]), max_new_tokens=4)
        assert {kind for _, _, kind in spec.engine.tiers} == {"greedy"}
        spec.generate(torch.tensor([[1, 2]]), max_new_tokens=4, repetition_penalty=1.2)
        assert len(spec.engine.tiers) == 4
        assert {kind for _, _, kind in spec.engine.tiers} == {"greedy", "sampled"}
        assert {width for width, kind in spec.engine.prefill_tiers if kind == "sampled"} == set(spec.prefill)
        assert {name: tensor.data_ptr() for name, tensor in spec.arena.items()} == places


def test_prefix_reuse_draws_the_same(specs: dict[str, Speculator]) -> None:
    """A prompt that is known but for its last token draws its first new token in a decode step."""
    spec = specs["ngram"]
    rng = random.Random(4)
    prompt = [rng.randrange(VOCAB) for _ in range(30)]
    first = spec.engine.submit(prompt, do_sample=True, seed=8, max_new_tokens=10).result()
    again = spec.engine.submit(prompt, do_sample=True, seed=8, max_new_tokens=10).result()
    assert again.stats.reused_tokens > 0
    assert again.token_ids == first.token_ids
