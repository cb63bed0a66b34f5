"""The two forms of a linear compute the same, and the choice between them is made where it can pay."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import speccompile
from speccompile.lowering import backends, linears
from speccompile.lowering.linears import LinearChoice, choose_linears
from tests.tiny import tiny_llama

STATIONARY = LinearChoice(True, "weight-stationary (forced by the test)")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(attention_bias=True)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.Eager, "choose_linears", lambda *_: STATIONARY)
    monkeypatch.setattr(backends.Inductor, "choose_linears", lambda *_: STATIONARY)


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("max_batch", [1, 2])
def test_weight_stationary_text_is_the_models_own(model: LlamaForCausalLM, backend: str, max_batch: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 and not parameter.any():
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    spec = speccompile.wrap(model, tiers=(0, 1, 3), max_batch=max_batch, max_len=90, backend=backend)
    prompts = torch.randint(1, 128, (max_batch, 24), generator=torch.Generator().manual_seed(2))
    wanted = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=40, do_sample=False)
    for draft_len in (0, 1, 3):
        spec.set_tier(draft_len)
        assert torch.equal(spec.generate(prompts, max_new_tokens=40), wanted)


@pytest.mark.usefixtures("forced")
def test_no_stock_linear_is_left_and_logits_keep_their_shape(model: LlamaForCausalLM) -> None:
    spec = speccompile.wrap(model, tiers=(0, 3), max_batch=2, max_len=64, backend="eager")
    for (draft_len, rows, _), tier in spec.engine.tiers.items():
        printed = tier.stages["outline"].python
        assert "aten.linear" not in printed
        assert "aten.mm" in printed
        assert tuple(tier.graph.values["logits"].meta["val"].shape) == (rows, draft_len + 1, 128)
    # One row of one token would be a matrix-vector product; two rows are none.
    widths = {key[:2]: tier.key.width for key, tier in spec.engine.tiers.items()}
    assert widths == {(0, 1): 2, (0, 2): 1, (3, 1): 4, (3, 2): 4}


def test_a_small_model_keeps_stock_linears(model: LlamaForCausalLM) -> None:
    assert not choose_linears(model, [1, 4]).weight_stationary
    assert "small" in choose_linears(model, [1, 4]).reason


@pytest.mark.parametrize(("gain", "chosen"), [(1.0, False), (1.14, False), (1.3, True)])
def test_only_a_clear_gain_chooses(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, gain: float, chosen: bool
) -> None:
    monkeypatch.setattr(linears, "SMALLEST_BYTES", 0)
    monkeypatch.setattr(linears, "_gain", lambda *_: gain)
    assert choose_linears(model, [1, 4, 8]).weight_stationary is chosen


def test_other_dtypes_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SMALLEST_BYTES", 0)
    monkeypatch.setattr(linears, "_gain", lambda *_: 9.0)
    assert not choose_linears(tiny_llama(dtype=torch.bfloat16), [1]).weight_stationary


def test_both_forms_are_timed_on_the_models_weights() -> None:
    weights = [nn.Linear(32, 48).weight.detach(), nn.Linear(48, 32).weight.detach()]
    assert linears._gain(weights, 1) > 0
    assert linears._gain(weights, 4) > 0
