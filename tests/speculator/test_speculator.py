"""What happens around a wrapped model: before the first step, in other modes of torch, after the model changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile.errors import Closed, EmptyPrompt, InvalidInput, ModelInTraining, UnknownTier, WeightsReplaced
from speccompile.speculator.speculator import Speculator
from support.errors import raises
from support.tiny import tiny_llama

PROMPT = torch.tensor([[7, 8, 9, 10] * 5])


def wrap(model: LlamaForCausalLM) -> Speculator:
    return speccompile.wrap(model, tiers=(0, 1, 3), max_len=200, backend="eager")


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


def test_the_fingerprint_is_whole_from_the_start(model: LlamaForCausalLM) -> None:
    spec = wrap(model)
    before = spec.arena.fingerprint()
    spec.generate(PROMPT, max_new_tokens=100)
    spec.generate(torch.randint(1, 100, (1, 90)), max_new_tokens=20)
    assert spec.arena.fingerprint() == before
    assert {entry[0] for entry in before} == {
        "arena",
        *(tier.name for tier in [*spec.engine.tiers.values(), *spec.engine.prefill_tiers.values()]),
    }


def test_wrapped_in_inference_mode_it_works_outside(model: LlamaForCausalLM) -> None:
    wanted = wrap(model).generate(PROMPT, max_new_tokens=20)
    with torch.inference_mode():
        spec = wrap(model)
        assert torch.equal(spec.generate(PROMPT, max_new_tokens=20), wanted)
    assert torch.equal(spec.generate(PROMPT, max_new_tokens=20), wanted)


def test_autocast_changes_nothing(model: LlamaForCausalLM) -> None:
    spec = wrap(model)
    wanted = spec.generate(PROMPT, max_new_tokens=20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(spec.generate(PROMPT, max_new_tokens=20), wanted)


def test_replaced_weights_are_refused_and_changed_ones_used(model: LlamaForCausalLM) -> None:
    spec = wrap(model)
    other = tiny_llama(seed=1)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    assert spec.check([PROMPT[0]], max_new_tokens=20)
    model.load_state_dict(tiny_llama(seed=2).state_dict(), assign=True)
    for decode in (lambda: spec.generate(PROMPT), lambda: spec.check([PROMPT[0]])):
        with raises(WeightsReplaced):
            decode()


def test_a_model_put_to_training_is_refused(model: LlamaForCausalLM) -> None:
    spec = wrap(model)
    model.train()
    with pytest.raises(ModelInTraining):
        spec.generate(PROMPT)


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        ([1, 2, 3], InvalidInput),
        (PROMPT[0], InvalidInput),
        ([[1.5, 2.0]], InvalidInput),
        (["text"], InvalidInput),
        ([PROMPT.repeat(2, 1)], InvalidInput),
        ([[]], EmptyPrompt),
    ],
)
def test_check_takes_token_ids_and_nothing_else(model: LlamaForCausalLM, prompts: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        wrap(model).check(prompts)


def test_misuse_of_a_speculator_is_an_error_of_its_class(model: LlamaForCausalLM) -> None:
    spec = wrap(model)
    with raises(InvalidInput, name="streamer"):
        spec.generate(PROMPT, streamer=object())  # type: ignore[arg-type]
    with raises(InvalidInput, name="eos_token_id"):
        spec.generate(PROMPT, eos_token_id=True)
    with pytest.raises(UnknownTier):
        spec.pipeline(5)
    spec.close()
    with pytest.raises(Closed), spec:
        pass
    with pytest.raises(Closed):
        spec.backend  # noqa: B018
