"""PEFT models are wrapped by what is inside, and a change of adapters is followed by no stale text."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model

import speccompile
from speccompile import Speculator
from speccompile.errors import ModelChanged, ModelInTraining, UnsupportedModel
from support.errors import raises
from support.tiny import tiny_llama

IDS = torch.tensor([[3, 1, 4, 1, 5]])
NEW = 10


def lora(seed: int, dropout: float = 0.0) -> LoraConfig:
    """Weights are drawn: by default an adapter begins as one that changes nothing."""
    torch.manual_seed(seed)
    targets = ["q_proj", "v_proj", "down_proj"]
    return LoraConfig(r=4, target_modules=targets, init_lora_weights=False, lora_dropout=dropout, task_type="CAUSAL_LM")


def wrapped(model: PeftModel) -> Speculator:
    return speccompile.wrap(model, "ngram", tiers=(0, 3), max_len=64, backend="eager")


@pytest.fixture(scope="module")
def adapted() -> PeftModel:
    with torch.random.fork_rng(devices=[]):
        model = get_peft_model(tiny_llama(), lora(0), "first")
        model.add_adapter("second", lora(1))
    return model.eval()


@pytest.fixture(scope="module")
def spec(adapted: PeftModel) -> Iterator[Speculator]:
    with wrapped(adapted) as spec:
        yield spec


def text(spec: Speculator) -> list[int]:
    return spec.generate(IDS, max_new_tokens=NEW)[0].tolist()


def own_text(model: PeftModel) -> list[int]:
    output = model.generate(
        input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    return output[0].tolist()


def test_a_peft_model_has_the_text_of_its_own_generate(spec: Speculator, adapted: PeftModel) -> None:
    with adapted.disable_adapter():
        plain = own_text(adapted)
    assert text(spec) == own_text(adapted) != plain
    assert spec.check(IDS, max_new_tokens=NEW)


def test_a_disabled_adapter_is_refused_until_it_is_enabled(spec: Speculator, adapted: PeftModel) -> None:
    with (
        adapted.disable_adapter(),
        raises(ModelChanged, what=re.compile(r"q_proj\._disable_adapters was False and is True")),
    ):
        text(spec)
    assert text(spec) == own_text(adapted)


def test_another_active_adapter_is_refused_until_it_is_built(adapted: PeftModel) -> None:
    with wrapped(adapted) as spec:
        first = text(spec)
        adapted.set_adapter("second")
        try:
            with raises(ModelChanged, what=re.compile(r"_active_adapter was \['first'\] and is \['second'\]")):
                text(spec)
            spec.rebuild()
            assert text(spec) == own_text(adapted) != first
        finally:
            adapted.set_adapter("first")


def test_a_merged_and_a_new_adapter_are_refused(spec: Speculator, adapted: PeftModel) -> None:
    adapted.merge_adapter()
    with raises(ModelChanged, what=re.compile(r"merged_adapters was \[\] and is \['first'\]")):
        text(spec)
    adapted.unmerge_adapter()
    adapted.add_adapter("third", lora(2))
    with raises(ModelChanged, what=re.compile(r"the module .*q_proj\.lora_\w+\.third \(\w+\) was added")):
        text(spec)
    adapted.delete_adapter("third")
    assert len(text(spec)) == IDS.shape[1] + NEW


def test_an_adapter_that_is_not_in_the_layers_is_refused() -> None:
    model = get_peft_model(tiny_llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    with raises(UnsupportedModel, reason=re.compile(r"its adapter \(PROMPT_TUNING\) is not only in the layers")):
        wrapped(model)


def test_an_adapter_in_training_mode_is_refused() -> None:
    with raises(ModelInTraining, model="PeftModelForCausalLM"):
        wrapped(get_peft_model(tiny_llama(), lora(0, dropout=0.1)))
