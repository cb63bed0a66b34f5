"""SmolLM2-135M in float32: the text is transformers' own, at every tier."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import speccompile
from benchmarks import guided
from speccompile.cli.models import encode, max_len_for
from speccompile.cli.prompts import BUILT_IN
from speccompile.runtime import check

pytestmark = pytest.mark.usefixtures("all_prompt_widths")

NEW_TOKENS = 20
NEAR_TIE = 1e-3

Smol = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def prompts(smollm2: Smol) -> list[torch.Tensor]:
    return [encode(smollm2[1], prompt.text) for prompt in BUILT_IN[:3]]


@pytest.fixture(scope="module")
def spec(smollm2: Smol) -> speccompile.Speculator:
    """One for all requests in float32, those with a guide too."""
    return speccompile.wrap(
        smollm2[0], mode="ngram", tiers=(0, 3, 7), policy="fixed:7", max_batch=2, max_len=guided.MAX_LEN
    )


@pytest.fixture(scope="module")
def decoded_once() -> Iterator[None]:
    """transformers decodes each prompt once for all tiers."""
    decode = check.transformers_greedy

    @functools.cache
    def once(model: PreTrainedModel, prompt: tuple[int, ...], new: int, eos: tuple[int, ...]) -> list[int]:
        return decode(model, list(prompt), new, list(eos))

    def known(model: PreTrainedModel, prompt: list[int], new: int, eos: list[int], processors: Any) -> list[int]:
        assert not processors
        return list(once(model, tuple(prompt), new, tuple(eos)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "transformers_greedy", known)
        yield


@pytest.mark.real
@pytest.mark.parametrize("draft_len", [0, 3, 7])
@pytest.mark.usefixtures("decoded_once")
def test_text_is_transformers_own(spec: speccompile.Speculator, prompts: list[torch.Tensor], draft_len: int) -> None:
    spec.set_tier(draft_len)
    report = spec.check(prompts, max_new_tokens=NEW_TOKENS)
    assert report.largest_logit_change < NEAR_TIE, str(report)


@pytest.mark.real
def test_drafts_are_accepted(spec: speccompile.Speculator, smollm2: Smol) -> None:
    spec.set_tier(7)
    spec.stats.reset()
    quote = "Repeat this sentence three times: The quick brown fox jumps over the lazy dog near the river bank."
    spec.generate(encode(smollm2[1], quote), max_new_tokens=NEW_TOKENS)
    assert spec.stats.acceptance_length > 1.5


@pytest.mark.real
def test_a_text_ends_at_a_stop_string(spec: speccompile.Speculator, smollm2: Smol) -> None:
    """Token for token as transformers' generate with the same stop strings, sentence marks and words."""
    model, words = smollm2
    spec.set_tier(3)
    ids = words("The capital of France is", return_tensors="pt").input_ids
    for stop in (".", [" the city", "\n"]):
        expected = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, stop_strings=stop, tokenizer=words)
        request = spec.engine.submit(ids, max_new_tokens=NEW_TOKENS, stop=stop, tokenizer=words)
        assert request.result().token_ids == expected[0, ids.shape[1] :].tolist()
        assert request.result().text == words.decode(request.new_tokens, skip_special_tokens=True)
        assert request.finish_reason == "stop"


@pytest.mark.real
def test_one_body_serves_all_layers_and_weights_are_shared(spec: speccompile.Speculator, smollm2: Smol) -> None:
    owned = {parameter.data_ptr() for parameter in smollm2[0].parameters()}
    packed = set()
    for tier in [*spec.engine.tiers.values(), *spec.prefill.values()]:
        assert [len(body.layers) for body in tier.graph.bodies.values()] == [30]
        for name, tensor in zip(tier.argument_names, tier.arguments, strict=True):
            port = tier.graph.ports[name]
            if port.role != "weight" or name.endswith("inv_freq"):
                continue
            if port.own:
                packed.add(tensor.data_ptr())
            else:
                assert tensor.data_ptr() in owned
    # Seven linears in each layer, and the lm_head, which is the embedding too: one copy of each for all tiers.
    assert len(packed) == 30 * 7 + 1


@pytest.mark.real
def test_rounded_to_int8_it_is_captured_as_strictly(smollm2: Smol, prompts: list[torch.Tensor]) -> None:
    options = {"tiers": (0, 3), "max_len": max_len_for(prompts, NEW_TOKENS)}
    with speccompile.wrap(smollm2[0], mode="ngram", weights="int8", **options) as rounded:
        assert rounded.check(prompts[::2], max_new_tokens=NEW_TOKENS, reference="plain")


@pytest.mark.real
def test_random_schemas_are_followed_and_drafts_change_nothing(spec: speccompile.Speculator, smollm2: Smol) -> None:
    tokenizer = smollm2[1]
    jobs = guided.make_jobs(tokenizer, 3, seed=1)
    spec.stats.reset()
    drafted, plain = (guided.decode(spec, jobs, draft_len) for draft_len in (7, 0))
    assert spec.stats.accepted_tokens > 0
    for job, request in zip(jobs, drafted.requests, strict=True):
        assert guided.problem(tokenizer, job, request) is None
    assert drafted.texts == plain.texts
