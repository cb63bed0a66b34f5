"""A drafter over packed weights: its own, or the target's rounded to int8."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.errors import CaptureMismatch, InvalidOption, LoweringError
from speccompile.heads import Eagle3Head, MtpHead
from speccompile.ops.cpu import rounded as rounded_module
from speccompile.ops.cpu.forms.int8 import Int8
from support.engines import read_all
from support.errors import raises
from support.packed_models import NEW, PROMPTS, gpt2, greedy
from support.tiny import random_prompt, tiny_llama


def drafting(model: Any, draft: Any, **options: Any) -> Speculator:
    sizes = {"tiers": (0, 3), "max_batch": 2, "max_len": 60, "backend": "eager", "prefix_reuse": False}
    return wrap(model, "draft_target", draft=draft, **sizes | options)


def test_the_target_rounded_to_int8_drafts_for_itself(model: LlamaForCausalLM) -> None:
    spec = drafting(model, "self:int8")
    printed = spec.tiers[3].stages.last.python
    assert "int8_linear" in printed and "packed_linear" in printed
    spec.set_tier(3)
    assert torch.equal(spec.generate(PROMPTS, max_new_tokens=NEW), greedy(model))
    # It is nearly the target, and not quite.
    assert 2.5 < spec.stats.acceptance_length <= 4
    assert "weights rounded to int8 drafts" in spec.explain()
    spec.generate(PROMPTS, max_new_tokens=NEW, do_sample=True, seed=1)


def test_rounded_weights_follow_a_change_of_the_targets() -> None:
    model = tiny_llama()
    spec = drafting(model, "self:int8")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-3)
    spec.set_tier(3)
    assert torch.equal(spec.generate(PROMPTS, max_new_tokens=NEW), greedy(model))
    assert spec.stats.acceptance_length > 2.5


def test_packs_follow_a_change_of_the_draft_models_own_weights(model: LlamaForCausalLM) -> None:
    draft = tiny_llama()
    spec = drafting(model, draft)
    lengths = []
    for factor in (1, -3):
        with torch.no_grad():
            draft.model.layers[1].mlp.down_proj.weight.mul_(factor)
        spec.set_tier(3)
        spec.stats.reset()
        assert torch.equal(spec.generate(PROMPTS, max_new_tokens=NEW), greedy(model))
        lengths.append(spec.stats.acceptance_length)
    assert lengths[0] > 3 > lengths[1]


def test_what_is_the_targets_is_packed_once(model: LlamaForCausalLM) -> None:
    tier = drafting(model, model).tiers[3]
    read = dict(zip(tier.argument_names, tier.arguments, strict=True))
    packs = {name: tensor.data_ptr() for name, tensor in read.items() if name.endswith("_packed")}
    shared = [name for name in packs if f"drafter_{name}" in packs]
    assert len(shared) == 2 * 7 + 1 and all(packs[name] == packs[f"drafter_{name}"] for name in shared)
    # Rounded ones are others.
    rounded = drafting(model, "self:int8").tiers[3].argument_names
    assert any(name.endswith("_int8") for name in rounded) and any(name.endswith("_packed") for name in rounded)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("make", [tiny_llama, gpt2])
def test_kv_behind_accepted_drafts_is_a_fresh_prompts_in_every_bit(make: Any, fused: bool) -> None:
    """Our kernels keep a row's order of sums, so single tokens, a step and a chunk compute the same."""
    model = make()
    spec = drafting(model, model, fused=fused)
    spec.set_tier(3)
    request = spec.engine.submit(random_prompt(9), max_new_tokens=40)
    while len(request.new_tokens) < 17:
        spec.engine.step()
    assert spec.stats.acceptance_length == 4
    text, slot = request.prompt + request.new_tokens, request.slot
    read_all(spec, slot)
    kept = {name: t[slot, : len(text) - 1].clone() for name, t in spec.arena.items() if name.startswith("drafter_")}
    request.cancel()
    fresh = spec.engine.submit(text, max_new_tokens=2)
    while not fresh.new_tokens:
        spec.engine.step()
    for name, before in kept.items():
        assert torch.equal(spec.arena[name][fresh.slot, : len(text) - 1], before), name
        # The same weights, and the same text.
        own = spec.arena[name.removeprefix("drafter_")]
        assert torch.equal(own[fresh.slot, : len(text) - 1], before), name


# --- draft_weights="int8" ------------------------------------------------------------------------


def draft_of(mode: str, model: LlamaForCausalLM) -> Any:
    if mode == "draft_target":
        return tiny_llama()
    return MtpHead.random(model, 3) if mode.startswith("mtp") else Eagle3Head.random(model, taps=(0, 1, 1))


def rounded(model: LlamaForCausalLM, mode: str, draft: Any, **options: Any) -> Speculator:
    sizes = {"tiers": (0, 3), "max_batch": 2, "max_len": 60, "backend": "eager", "prefix_reuse": False}
    return wrap(model, mode, draft=draft, **{"draft_weights": "int8"} | sizes | options)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("draft_target", {}),
        ("draft_target", {"weights": "int8"}),
        ("eagle3", {}),
        ("eagle3_one_model", {"free_originals": True}),
        ("mtp", {}),
        ("mtp", {"chain": "target"}),
        ("mtp_eagle", {"fused": True}),
    ],
)
def test_a_rounded_drafter_changes_no_text(mode: str, options: dict[str, Any]) -> None:
    model = tiny_llama()
    same = options.get("weights") != "int8"
    expected = greedy(model) if same else None
    spec = rounded(model, mode, draft_of(mode, model), **options)
    tier = spec.tiers[3]
    names = tier.argument_names + (() if tier.drafter is None else tier.drafter.argument_names)
    own = [name for name in names if name.startswith("drafter_") and name.endswith("_int8")]
    assert len(own) > 5 and not any(name.startswith("drafter_") and name.endswith("_packed") for name in names)
    assert same or any(name.endswith("_int8") and not name.startswith("drafter_") for name in names)
    texts = []
    for draft_len in (3, 0):
        spec.set_tier(draft_len)
        texts.append(spec.generate(PROMPTS, max_new_tokens=NEW))
        assert spec.stats.draft_tokens > 0
    assert torch.equal(*texts) and (expected is None or torch.equal(texts[0], expected))


def test_a_rounded_head_drafts_nearly_what_it_drafts_unrounded(model: LlamaForCausalLM) -> None:
    head = draft_of("eagle3", model)
    left = []
    for form in ("same", "int8"):
        spec = rounded(model, "eagle3_one_model", head, draft_weights=form)
        spec.set_tier(0)
        request = spec.engine.submit(PROMPTS[0].tolist(), max_new_tokens=NEW)
        while len(request.new_tokens) < 5:
            spec.engine.step()
        left.append(spec.arena["drafter_newest"][request.slot].clone())
    assert 0 < float((left[0] - left[1]).norm() / left[0].norm()) < 0.05


#: Of a wrap that fails after the steps.
LEAST: dict[str, Any] = {"tiers": (0, 1), "max_batch": 1, "max_len": 16}


def test_packs_of_a_head_are_checked(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = Int8.pack
    monkeypatch.setattr(Int8, "pack", lambda form, weight: pack(form, weight.flip(0)))
    with raises(LoweringError, pack=re.compile(r"\.weight$|layers")):
        rounded(model, "eagle3_one_model", draft_of("eagle3", model), **LEAST)


def test_weights_of_a_head_that_is_misread_are_found(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As strictly as without rounding: a thousandth more is not a rounding."""
    right = rounded_module._UnroundedOps.__torch_dispatch__
    monkeypatch.setattr(rounded_module._UnroundedOps, "__torch_dispatch__", slightly_more(right))
    with pytest.raises(CaptureMismatch):
        rounded(model, "eagle3_one_model", draft_of("eagle3", model), **LEAST)


def slightly_more(right: Any) -> Any:
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = right(self, func, types, args, kwargs)
        if func is torch.ops.speccompile.int8_linear.default:
            return 1.001 * result
        if func is torch.ops.speccompile.int8_linears.default:
            return [1.001 * each for each in result]
        return result

    return dispatch


@pytest.mark.parametrize("value", ["int3", 8, None])
def test_other_forms_of_a_drafters_weights(model: LlamaForCausalLM, value: Any) -> None:
    with raises(InvalidOption, name="draft_weights", reason=re.compile("choose from auto, same, int8, int4")):
        wrap(model, "draft_target", draft=model, draft_weights=value, backend="eager")


@pytest.mark.parametrize(
    ("mode", "options", "says"),
    [
        ("mtp", {"free_originals": True}, "free_originals=True frees the weights"),
        ("draft_target", {"free_originals": True}, "free_originals=True frees the weights"),
        ("draft_target", {"weights": "int8"}, "weights are int8 already"),
    ],
)
def test_what_shares_weights_does_not_go_with_rounding(mode: str, options: dict[str, Any], says: str) -> None:
    model = tiny_llama()
    draft = model if mode == "draft_target" else draft_of(mode, model)
    with raises(InvalidOption, name="draft_weights", value="int8", reason=re.compile(says)):
        rounded(model, mode, draft, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weights": "int8"}, "weights are int8 already"),
        ({"free_originals": True}, "free_originals=True frees the weights"),
    ],
)
def test_what_does_not_go_with_rounding(model: LlamaForCausalLM, options: dict[str, Any], says: str) -> None:
    with raises(InvalidOption, name="draft", value="self:int8", reason=re.compile(says)):
        drafting(model, "self:int8", **options)


def test_rounding_needs_our_ops(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with raises(InvalidOption, name="draft", value="self:int8", reason=re.compile(r"it needs the C\+\+ ops")):
        drafting(model, "self:int8")
    with raises(InvalidOption, name="draft_weights", value="int8", reason=re.compile(r"it needs the C\+\+ ops")):
        rounded(model, "eagle3", draft_of("eagle3", model))
