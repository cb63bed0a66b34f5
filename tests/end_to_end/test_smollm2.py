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
def spec(smollm2: Smol, prompts: list[torch.Tensor]) -> speccompile.Speculator:
    return speccompile.wrap(
        smollm2[0], mode="ngram", tiers=(0, 3, 7), policy="fixed:7", max_len=max_len_for(prompts, NEW_TOKENS)
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
def test_random_schemas_are_followed_and_drafts_change_nothing(smollm2: Smol) -> None:
    model, tokenizer = smollm2
    jobs = guided.make_jobs(tokenizer, 3, seed=1)
    with speccompile.wrap(
        model, "ngram", tiers=(0, 7), policy="fixed:7", max_batch=2, max_len=guided.MAX_LEN, sampling=True
    ) as drafting:
        drafted, plain = (guided.decode(drafting, jobs, draft_len) for draft_len in (7, 0))
        assert drafting.stats.accepted_tokens > 0
    for job, request in zip(jobs, drafted.requests, strict=True):
        assert guided.problem(tokenizer, job, request) is None
    assert drafted.texts == plain.texts
    assert 0 < drafted.truncated < drafted.drafted
