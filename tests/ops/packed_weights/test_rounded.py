"""Rounded weights are another model, which ``check`` knows."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import speccompile
from speccompile.errors import CaptureMismatch, InvalidOption, LoweringError
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture import check
from speccompile.lowering.kernels import STOCK
from speccompile.ops.cpu import rounded
from speccompile.ops.cpu.forms import FORMS
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.ops.cpu.rounded import check_kernels
from speccompile.passes.base import Changes
from speccompile.passes.target.choose_linear import PackLinears, is_router
from speccompile.runtime.check import first_difference
from speccompile.speculator.speculator import Speculator
from speccompile.utils.weight_forms import WeightForm, WeightForms
from support.errors import raises
from support.families import family, model_of
from support.packed_models import MODELS, NEW, PROMPTS, greedy, wrapped
from support.tiny import known_capture, tiny_llama

rounded_forms = pytest.mark.parametrize("form", ["int8", "int4"])
CROSSED = ("layers.1.mlp.up_proj.weight", "layers.1.mlp.gate_proj.weight")


@pytest.mark.parametrize(
    ("name", "form"), [("untied", "int8"), ("tied", "int4"), ("gpt2", "int8"), ("gpt2", "int4"), ("bfloat16", "int4")]
)
def test_rounded_weights_make_another_model_which_check_compares_with(name: str, form: str) -> None:
    spec = wrapped(MODELS[name](), weights=form)
    printed = spec.tiers[3].stages["outline"].python
    assert f"{form}_linear" in printed and "aten.linear" not in printed and "aten.addmm" not in printed
    assert f"rounded to {form}" in spec.explain()
    for draft_len in (0, 3):
        spec.set_tier(draft_len)
        report = spec.check(list(PROMPTS), max_new_tokens=30)
        # What is almost undecided may be rounded to either side.
        assert report or report.largest_logit_change < (0.2 if "bfloat16" in spec.explain() else 0.05)
    assert spec.check(list(PROMPTS), max_new_tokens=30, reference="plain")


@rounded_forms
def test_the_check_tells_rounded_weights_from_the_models_own(form: str) -> None:
    model = tiny_llama()
    rounded = wrapped(model, weights=form).generate(PROMPTS, max_new_tokens=NEW)
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
    assert f"of which rounding by itself causes {stirred.rounding:.3g}" in str(stirred)
    # Nothing is left.
    assert first_difference(*parted) == plain


@rounded_forms
def test_rounded_weights_follow_a_change(form: str) -> None:
    model = tiny_llama()
    spec = wrapped(model, weights=form)
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


@rounded_forms
def test_an_op_that_is_wrong_on_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch, form: WeightForm) -> None:
    packs, right = WeightPacks(WeightForms(form)), FORMS[form].linear
    packs.of("layers.0.up", torch.randn(40, 100))
    check_kernels(packs)
    monkeypatch.setattr(type(FORMS[form]), "linear", staticmethod(lambda *inputs: 1.001 * right(*inputs)))
    with raises(LoweringError, linear="layers.0.up") as caught:
        check_kernels(packs)
    assert caught.value.fields["difference"] > 0


@rounded_forms
def test_outputs_that_are_nearly_zero_are_no_fault(form: WeightForm) -> None:
    """Float16 has no scales for them, and next to the others they are nothing."""
    packs, weight = WeightPacks(WeightForms(form)), torch.randn(1024, 64)
    weight[512:] *= 1e-9
    packs.of("layers.0.up", weight)
    check_kernels(packs)


@rounded_forms
def test_a_pack_that_does_not_hold_its_weight_is_refused(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    kind = type(FORMS[form])
    pack = kind.pack
    monkeypatch.setattr(kind, "pack", lambda self, weight: pack(self, weight.flip(0)))
    with raises(LoweringError, pack=re.compile("embed_tokens|layers.0")):
        wrapped(tiny_llama(), weights=form)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ("int3", "choose from same, int8, int4, or give a mapping"),
        (None, "choose from same"),
        (8, "choose from same"),
        ({}, "it is empty"),
        ({"lm_head": "int3"}, "'int3', of 'lm_head', is not a form"),
        ({".lm_head": "int4"}, "must be a module's name"),
        ({3: "int4"}, "must be a module's name"),
    ],
)
def test_forms_of_weights_that_there_are_not(weights: Any, says: str) -> None:
    with raises(InvalidOption, name="weights", reason=re.compile(re.escape(says))):
        wrapped(tiny_llama(), weights=weights)


def test_a_module_without_a_packed_linear_is_refused() -> None:
    with raises(InvalidOption, name="weights", reason=re.compile("no packed linear is in a module 'mlp.up'")):
        wrapped(tiny_llama(), weights={"lm_head": "int4", "mlp.up": "int8"})


def forms_of(spec: Speculator) -> dict[str, str]:
    """By path, without the numbers of layers."""
    return {re.sub(r"\.\d+", "", path): pack.form.name for path, pack in spec._build.packs.items()}


@pytest.mark.parametrize("tied", [False, True])
def test_int4_keeps_embeddings_and_lm_head_in_int8(tied: bool) -> None:
    forms = forms_of(wrapped(tiny_llama(tie_word_embeddings=tied), weights="int4"))
    of_vocabulary = [forms.pop("lm_head.weight"), *([] if tied else [forms.pop("model.embed_tokens.weight")])]
    assert set(of_vocabulary) == {"int8"} and set(forms.values()) == {"int4"} and len(forms) == 7


@pytest.mark.parametrize(
    ("weights", "form"), [("int4", "same"), ({"*": "int4", "mlp.gate": "int8"}, "int8")], ids=["unnamed", "named"]
)
def test_routers_keep_their_values_unless_they_are_named(weights: Any, form: str) -> None:
    spec = wrapped(family("qwen3_moe"), weights=weights, tiers=(0,), max_batch=1)
    forms = forms_of(spec)
    assert forms.pop("model.layers.mlp.gate.weight") == form
    assert set(forms.values()) == {"int4", "int8"}
    assert spec.check(PROMPTS[:1, :8].tolist(), max_new_tokens=6, eos_token_id=[])


@pytest.mark.parametrize(
    ("name", "routers"),
    [("gpt_oss", {"mlp.router"}), ("phimoe", {"mlp.router"}), ("deepseek_v3", {"mlp.gate"}), ("laguna", {"mlp.gate"})],
)
def test_routers_are_the_linears_whose_results_are_chosen_from(name: str, routers: set[str]) -> None:
    graph = known_capture(family(name)).graph
    found = {str(graph.ports[node.name].path) for node in graph.placeholders if is_router(node)}
    assert {re.sub(r".*layers\.\d+\.|\.weight", "", path) for path in found} == routers


def test_other_tables_than_that_of_the_tokens_keep_their_values() -> None:
    """GPT-2 adds a row of a table for each position."""
    spec = wrapped(MODELS["gpt2"](), weights="int8")
    assert "transformer.wpe.weight" not in forms_of(spec) and spec.check(list(PROMPTS), max_new_tokens=20)


@pytest.mark.parametrize("name", ["gpt2", "gemma4"])
def test_the_table_of_tokens_is_rounded_however_the_model_reads_them(name: str) -> None:
    """GPT-2 gives them another shape, Gemma 4 puts other tokens in the place of images'. Neither is tied here."""
    model = model_of(name, tie_word_embeddings=False)
    spec = wrapped(model, weights="int8")
    embedding = model.get_input_embeddings().weight
    assert any(pack.weight is not None and pack.weight.data_ptr() == embedding.data_ptr() for pack in spec._build.packs)
    assert spec.check(list(PROMPTS[:, :16] % 90 + 5), max_new_tokens=20, reference="plain")


@pytest.mark.parametrize("free_originals", [False, True])
def test_products_with_a_transposed_weight_are_linears(free_originals: bool) -> None:
    """Falcon's layers multiply with ``weight.T``."""
    model = model_of("falcon")
    calibration = speccompile.calibrate(model, PROMPTS)
    spec = wrapped(model, weights="int4", calibration=calibration, free_originals=free_originals)
    forms = [pack.form.name for _, pack in spec._build.packs.items()]
    assert forms.count("int4") == 4 * len(model.transformer.h) and forms.count("int8") == 2
    assert spec.check(list(PROMPTS), max_new_tokens=NEW)


def test_both_names_of_a_tied_weight_may_say_the_same() -> None:
    weights = {"embed_tokens": "int4", "lm_head": "int4"}
    assert forms_of(wrapped(tiny_llama(tie_word_embeddings=True), weights=weights))["lm_head.weight"] == "int4"


@pytest.mark.parametrize("names", [("embed_tokens", "lm_head"), ("lm_head", "embed_tokens")])
def test_two_forms_of_a_tied_weight_are_refused(names: tuple[str, str]) -> None:
    weights = dict(zip(names, ("int4", "int8"), strict=True))
    with raises(InvalidOption, name="weights", reason=re.compile("decides on the weights of .*; leave one out")):
        wrapped(tiny_llama(tie_word_embeddings=True), weights=weights)


@pytest.mark.parametrize("tied", [False, True])
def test_modules_have_forms_of_their_own(tied: bool) -> None:
    """A tied weight by any of its names."""
    head = "embed_tokens" if tied else "lm_head"
    weights = {"*": "int8", head: "int4", "mlp": "same", "mlp.down_proj": "int4"}
    spec = wrapped(tiny_llama(tie_word_embeddings=tied), weights=weights)
    forms = forms_of(spec)
    layer = "model.layers."
    assert (forms["lm_head.weight"], forms[f"{layer}mlp.down_proj.weight"]) == ("int4", "int4")
    assert (forms[f"{layer}mlp.up_proj.weight"], forms[f"{layer}self_attn.q_proj.weight"]) == ("same", "int8")
    assert "4 packed" in spec.explain() and f"{8 if tied else 9} rounded to int8" in spec.explain()
    assert spec.check(list(PROMPTS), max_new_tokens=30)


def test_the_order_of_names_makes_no_difference() -> None:
    """Wraps whose forms are written in the same way are one model to what is stored."""
    named = {"layers.0": "int8", "mlp.down_proj": "same", "mlp.gate_proj": "int4", "layers.0.mlp": "int8"}
    first, second = (WeightForms.of(dict(items)) for items in (named.items(), reversed(named.items())))
    assert str(first) == str(second)
    for module, form in {"mlp.down_proj": "int8", "self_attn.q_proj": "int8", "mlp.up_proj": "int8"}.items():
        modules = [f"model.layers.0.{module}"]
        assert [forms.form(modules, of_vocabulary=False) for forms in (first, second)] == [form, form]
    del named["layers.0.mlp"]
    for items in (named.items(), reversed(named.items())):
        forms = WeightForms.of(dict(items))
        assert forms.form(["model.layers.0.mlp.down_proj"], of_vocabulary=False) == "same"
        assert forms.form(["model.layers.0.mlp.gate_proj"], of_vocabulary=False) == "int4"


def test_only_named_modules_are_rounded() -> None:
    assert set(forms_of(wrapped(tiny_llama(), weights={"layers.1": "int4"})).items()) >= {("lm_head.weight", "same")}


@rounded_forms
def test_rounding_needs_the_ops(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: STOCK)
    with raises(InvalidOption, name="weights", reason=re.compile("it needs the C")):
        wrapped(tiny_llama(), weights=form)


@pytest.mark.parametrize("weights", ["int4", {"lm_head": "int4", "layers.0": "int8"}], ids=["form", "modules"])
def test_a_package_has_the_forms_of_its_wrap(tmp_path: Path, weights: Any) -> None:
    model = tiny_llama()
    with wrapped(model, weights=weights) as spec:
        spec.save(tmp_path / "package")
        wanted = spec.generate(PROMPTS, max_new_tokens=12)
    with speccompile.load(tmp_path / "package", model) as again:
        assert again._options.weights == weights and torch.equal(again.generate(PROMPTS, max_new_tokens=12), wanted)
