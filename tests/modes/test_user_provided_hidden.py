"""A drafter of the user's own that reads hidden states of the target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.errors import InvalidOption
from support.dice import Dice
from support.errors import raises
from support.medusa import OneAfterAnother, fitted_heads

NEW, KMAX = 24, 3
SIZES: dict[str, Any] = {"tiers": (0, KMAX), "max_batch": 2, "max_len": 70, "backend": "eager"}
PROMPTS = ([5, 17, 5, 17, 9], list(range(30, 50)), [7])


@pytest.fixture(scope="module")
def texts(model: LlamaForCausalLM) -> list[list[int]]:
    """What transformers writes."""
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0].tolist() for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM, texts: list[list[int]]) -> Iterator[Speculator]:
    drafter = OneAfterAnother(fitted_heads(model, texts, KMAX)).eval()
    with wrap(model, "user_provided", draft=drafter, reads_hidden=(0, "model.norm"), **SIZES) as spec:
        yield spec


def test_the_text_is_that_of_transformers_and_drafts_are_believed(spec: Speculator, texts: list[list[int]]) -> None:
    spec.set_tier(KMAX)
    spec.stats.reset()
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert spec.generate(torch.tensor([prompt]), max_new_tokens=NEW)[0].tolist() == text
    assert spec.stats.acceptance_length > 2.5, "a drafter that read anything else would be wrong"
    assert "reading the hidden states of 0, model.norm" in spec.explain()


def test_tiers_that_change_leave_the_text_as_it_is(
    spec: Speculator, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec.engine.policies, "policy", Dice((0, KMAX)))
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert spec.generate(torch.tensor([prompt]), max_new_tokens=NEW)[0].tolist() == text


@pytest.mark.parametrize("places", [(2,), (True,), (0.5,), 1])
def test_places_that_the_target_lacks_are_refused(model: LlamaForCausalLM, places: Any) -> None:
    with raises(InvalidOption, name="reads_hidden"):
        wrap(model, "user_provided", draft=lambda *_: None, reads_hidden=places, **SIZES)


def test_a_drafter_on_the_host_reads_none(model: LlamaForCausalLM) -> None:
    with raises(InvalidOption, name="reads_hidden"):
        wrap(model, "user_provided", draft=lambda *_: None, host=True, reads_hidden=(0,), **SIZES)
