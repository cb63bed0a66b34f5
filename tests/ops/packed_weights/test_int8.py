"""Weights rounded to int8 are another model, which ``check`` knows."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from speccompile.errors import CaptureMismatch, InvalidOption, LoweringError
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture import check
from speccompile.lowering.kernels import STOCK
from speccompile.ops.cpu import packing, rounded
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.ops.cpu.rounded import check_kernels
from speccompile.passes.base import Changes
from speccompile.passes.target.choose_linear import PackLinears
from speccompile.runtime.check import first_difference
from support.errors import raises
from support.packed_models import MODELS, NEW, PROMPTS, greedy, wrapped
from support.tiny import tiny_llama

ops = torch.ops.speccompile
CROSSED = ("layers.1.mlp.up_proj.weight", "layers.1.mlp.gate_proj.weight")


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


def test_a_difference_says_what_the_last_bits_make(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    parted = model, 0, [5, 6, 7], [1], [2]
    plain, smooth = first_difference(*parted), first_difference(*parted, rounds=True)
    assert plain is not None and plain.rounding == 0 and "rounding" not in str(plain)
    assert smooth is not None and 0 < smooth.rounding < 1e-5
    # As many bits as a real model's rounding stirs up.
    monkeypatch.setattr("speccompile.runtime.check.LAST_BITS", 0.01)
    stirred = first_difference(*parted, rounds=True)
    assert stirred is not None and stirred.rounding > 1e-3
    assert f"of which rounding alone makes {stirred.rounding:.3g}" in str(stirred)
    # Nothing is left.
    assert first_difference(*parted) == plain


def test_rounded_weights_follow_a_change() -> None:
    model = tiny_llama()
    spec = wrapped(model, weights="int8")
    before = spec.generate(PROMPTS, max_new_tokens=20)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-3)
    assert not torch.equal(spec.generate(PROMPTS, max_new_tokens=20), before)
    assert spec.check(list(PROMPTS), max_new_tokens=20)


def test_the_capture_check_is_as_strict_as_without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check.TOLERANCE, torch.float32, 1e-5)
    wrapped(tiny_llama(), weights="int8")
    # Rounded inputs alone are farther off than that.
    monkeypatch.setattr(rounded, "_UnroundedOps", contextlib.nullcontext)
    with pytest.raises(CaptureMismatch):
        wrapped(tiny_llama(), weights="int8")


def test_a_linear_over_another_weights_pack_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding hides none of what the capture check is for."""
    right = PackLinears.run

    def crossed(self: PackLinears, graph: StepGraph) -> Changes:
        up, gate = (next(p for p in graph.ports.values() if p.path and p.path.endswith(name)) for name in CROSSED)
        graph.ports |= {up.name: replace(up, value=gate.value), gate.name: replace(gate, value=up.value)}
        return right(self, graph)

    monkeypatch.setattr(PackLinears, "run", crossed)
    with pytest.raises(CaptureMismatch):
        wrapped(tiny_llama(), weights="int8")


def test_an_op_that_is_wrong_on_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packs, right = WeightPacks("int8"), ops.int8_linear
    packs.of("layers.0.up", torch.randn(40, 100))
    check_kernels(packs)
    monkeypatch.setattr(rounded, "ops", SimpleNamespace(int8_linear=lambda *inputs: 1.001 * right(*inputs)))
    with raises(LoweringError, linear="layers.0.up") as caught:
        check_kernels(packs)
    assert caught.value.fields["difference"] > 0


def test_a_pack_that_does_not_hold_its_weight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = packing.pack_int8
    monkeypatch.setattr(packing, "pack_int8", lambda weight: pack(weight.flip(0)))
    with raises(LoweringError, pack=re.compile("layers.0")):
        wrapped(tiny_llama(), weights="int8")


@pytest.mark.parametrize("form", ["int4", None, 8])
def test_forms_of_weights_that_there_are_not(form: Any) -> None:
    with raises(InvalidOption, name="weights", reason=re.compile("choose from same, int8")):
        wrapped(tiny_llama(), weights=form)


def test_int8_needs_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: STOCK)
    with raises(InvalidOption, name="weights", reason=re.compile("it needs the C")):
        wrapped(tiny_llama(), weights="int8")
