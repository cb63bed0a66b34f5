"""Every model that cannot be captured is refused with an error of its own that says why."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny import tiny_llama
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaModel, PreTrainedModel

import speccompile
from speccompile.errors import (
    ModelInTraining,
    ModelOnSeveralDevices,
    SpecCompileError,
    UnsupportedDtype,
    UnsupportedModel,
)
from speccompile.graph_capture.support import decoder_layers, inspect_model, module_path


def tiny_gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=128)).eval()


def without_a_head() -> PreTrainedModel:
    return LlamaModel(tiny_llama().config).eval()


def with_rope(**rope: Any) -> PreTrainedModel:
    return tiny_llama(rope_parameters={"rope_theta": 10000.0} | rope)


def longrope() -> PreTrainedModel:
    factors = [1.0] * 8
    return with_rope(
        rope_type="longrope", short_factor=factors, long_factor=factors, original_max_position_embeddings=128
    )


def quantised() -> PreTrainedModel:
    model = tiny_llama()
    model.hf_quantizer = object()
    return model


def in_training() -> PreTrainedModel:
    return tiny_llama().train()


def on_two_devices() -> PreTrainedModel:
    model = tiny_llama()
    model.model.layers[1].mlp.to("meta")
    return model


def buffer_on_another_device() -> PreTrainedModel:
    model = tiny_llama()
    model.model.rotary_emb.to("meta")
    return model


def mixed_dtypes() -> PreTrainedModel:
    model = tiny_llama()
    model.lm_head.to(torch.bfloat16)
    return model


REFUSED: list[tuple[Any, type[SpecCompileError], str]] = [
    (lambda: nn.Linear(2, 2), UnsupportedModel, "Linear cannot be captured: it is not a transformers PreTrainedModel"),
    (lambda: "gpt2", UnsupportedModel, "str cannot be captured: it is not a transformers PreTrainedModel"),
    (tiny_gpt2, UnsupportedModel, r"GPT2LMHeadModel .* this is 'gpt2'; use LlamaForCausalLM"),
    (without_a_head, UnsupportedModel, "LlamaModel .* only Llama-architecture causal LMs"),
    (lambda: with_rope(rope_type="dynamic", factor=2.0), UnsupportedModel, r"rotary table \('dynamic'\).*supported: "),
    (longrope, UnsupportedModel, r"rotary table \('longrope'\)"),
    (quantised, UnsupportedModel, "weights are quantised; load it with dtype=torch.float32"),
    (in_training, ModelInTraining, r"is in training mode.*Call model.eval\(\) first"),
    (on_two_devices, ModelOnSeveralDevices, r"several devices \(cpu, meta\).*model.to\('cpu'\)"),
    (buffer_on_another_device, ModelOnSeveralDevices, r"several devices \(cpu, meta\)"),
    (lambda: tiny_llama(dtype=torch.float64), UnsupportedDtype, r"weights in torch.float64.*model.to\(torch.float32\)"),
    (mixed_dtypes, UnsupportedDtype, "weights in torch.bfloat16, torch.float32. Supported on cpu: .* one for all"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[message[:24] for *_, message in REFUSED])
def test_refused_with_the_reason(make: Any, error: type[SpecCompileError], message: str) -> None:
    model = make()
    with pytest.raises(error, match=message):
        inspect_model(model)
    # wrap refuses it as well, before it does any work.
    with pytest.raises(error, match=message):
        speccompile.wrap(model, "none", tiers=(0,), max_len=8, backend="eager")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_supported_is_described(dtype: torch.dtype) -> None:
    info = inspect_model(tiny_llama(layers=3, hidden=32, vocab=96, dtype=dtype))
    assert info.name == "LlamaForCausalLM" and info.dtype is dtype and info.device == torch.device("cpu")
    assert (info.num_layers, info.vocab_size, info.hidden_size) == (3, 96, 32)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
        {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_fixed_rotary_tables_are_captured(rope: dict[str, Any]) -> None:
    # wrap itself compares the captured logits with the model's own.
    speccompile.wrap(with_rope(**rope), "none", tiers=(0,), max_len=64, backend="eager").close()


def test_decoder_layers_are_found_by_their_number() -> None:
    model = tiny_llama(layers=3)
    path, layers = decoder_layers(model)
    assert path == "model.layers" and layers is model.model.layers
    assert module_path(model, model.model.layers[2].mlp) == "model.layers.2.mlp"
    other = copy.deepcopy(model)
    other.config.num_hidden_layers = 7
    with pytest.raises(UnsupportedModel, match="no list of decoder layers"):
        decoder_layers(other)
