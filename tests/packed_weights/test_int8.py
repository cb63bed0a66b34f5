"""Weights rounded to int8 are another model, which ``check`` knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_models import MODELS, NEW, PROMPTS, greedy, wrapped
from tiny import tiny_llama

from speccompile.errors import InvalidOption
from speccompile.lowering.kernels import STOCK


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_rounded_weights_make_another_model_which_check_compares_with(make: Any) -> None:
    spec = wrapped(make(), weights="int8")
    printed = spec.tiers[3].stages["outline"].python
    assert "int8_linear" in printed and "aten.linear" not in printed and "aten.addmm" not in printed
    assert "rounded to int8" in spec.explain()
    for draft_len in (0, 3):
        spec.set_tier(draft_len)
        report = spec.check(list(PROMPTS), max_new_tokens=30)
        # What is almost undecided may be rounded to either side.
        assert report or report.largest_logit_change < (0.2 if "bfloat16" in spec.explain() else 0.05)
    assert spec.check(list(PROMPTS), max_new_tokens=30, reference="plain")


def test_the_check_tells_rounded_weights_from_the_models_own() -> None:
    model = tiny_llama()
    rounded = wrapped(model, weights="int8").generate(PROMPTS, max_new_tokens=NEW)
    assert not torch.equal(rounded, greedy(model))


def test_rounded_weights_follow_a_change() -> None:
    model = tiny_llama()
    spec = wrapped(model, weights="int8")
    before = spec.generate(PROMPTS, max_new_tokens=20)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-3)
    assert not torch.equal(spec.generate(PROMPTS, max_new_tokens=20), before)
    assert spec.check(list(PROMPTS), max_new_tokens=20)


@pytest.mark.parametrize("form", ["int4", None, 8])
def test_forms_of_weights_that_there_are_not(form: Any) -> None:
    with pytest.raises(InvalidOption, match="choose from same, int8"):
        wrapped(tiny_llama(), weights=form)


def test_int8_needs_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: STOCK)
    with pytest.raises(InvalidOption, match="it needs the C"):
        wrapped(tiny_llama(), weights="int8")
