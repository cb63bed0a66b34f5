"""``free_originals=True`` with rounded weights: the model has those alone, and computes with them."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

from speccompile.errors import OriginalsFreed
from speccompile.ops.cpu.forms import FORMS
from support.errors import raises
from support.packed_models import MODELS, PROMPTS, alive, greedy, watched, with_freed_originals, wrapped
from support.tiny import tiny_llama

MIXED = {"*": "int4", "lm_head": "same", "down_proj": "int8"}


@pytest.mark.parametrize(("name", "form"), [("untied", "int8"), ("tied", MIXED), ("gpt2", "int4")], ids=str)
def test_no_float_weight_is_left(name: str, form: Any) -> None:
    model = MODELS[name]()
    refs = watched(model)
    matrices = {path for path, parameter in model.named_parameters() if parameter.dim() == 2}
    matrices -= {"gpt2": {"transformer.wpe.weight"}}.get(name, set())
    spec = with_freed_originals(model, weights=form)
    spec.generate(PROMPTS, max_new_tokens=8)
    gc.collect()
    assert set(refs) - alive(refs) == matrices
    explained = spec.explain()
    assert f"originals freed: {len(matrices)} of them in {spec._build.packs.nbytes / 2**20:.1f} MiB" in explained
    assert "rounded to int" in explained


@pytest.mark.parametrize(
    ("name", "form"), [("untied", "int4"), ("tied", MIXED), ("gpt2", "int8"), ("bfloat16", "int4")], ids=str
)
def test_the_text_is_that_without_it(name: str, form: Any) -> None:
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    with wrapped(plain, weights=form) as spec:
        wanted = spec.generate(PROMPTS, max_new_tokens=20, eos_token_id=[])
        identity = spec.target_id
        with torch.no_grad():
            logits = spec(PROMPTS).logits
    spec = with_freed_originals(model, weights=form)
    assert spec.target_id == identity
    with torch.no_grad():
        assert torch.equal(spec(PROMPTS).logits, logits)
    for draft_len in (0, 3):
        spec.set_tier(draft_len)
        assert torch.equal(spec.generate(PROMPTS, max_new_tokens=20, eos_token_id=[]), wanted)
        report = spec.check(list(PROMPTS), max_new_tokens=20)
        assert report or report.largest_logit_change < (0.2 if name == "bfloat16" else 0.05)


def test_the_check_compares_with_the_models_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model computes with the packs, not what the steps compute."""
    spec = with_freed_originals(tiny_llama(), weights="int8")
    right = FORMS["int8"].linear
    monkeypatch.setattr(type(FORMS["int8"]), "linear", staticmethod(lambda *inputs: -right(*inputs)))
    assert not spec.check(list(PROMPTS), max_new_tokens=20)


@pytest.mark.parametrize(("name", "form"), [("tied", "int4"), ("gpt2", "int8")])
def test_the_model_itself_has_rounded_weights(name: str, form: str) -> None:
    model = MODELS[name]()
    spec = with_freed_originals(model, weights=form)
    rounded = MODELS[name]()
    with torch.no_grad():
        for path, pack in spec._build.packs.items():
            transposed = name == "gpt2" and "wte" not in path and "lm_head" not in path
            rounded.get_parameter(path).copy_(pack.unpack().t() if transposed else pack.unpack())
    state = model.state_dict()
    assert state.keys() == rounded.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in rounded.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(PROMPTS).logits, rounded(PROMPTS).logits)
    assert torch.equal(greedy(model, new=12), greedy(rounded, new=12))


def test_its_weights_cannot_be_changed() -> None:
    model = tiny_llama()
    spec = with_freed_originals(model, weights="int4")
    up = model.model.layers[0].mlp.up_proj
    with raises(OriginalsFreed):
        up.weight = torch.zeros_like(up.weight)
    with raises(OriginalsFreed):
        model.load_state_dict(tiny_llama(seed=1).state_dict(), strict=False)
    with raises(OriginalsFreed):
        wrapped(model, weights="int4")
    spec.generate(PROMPTS, max_new_tokens=4)
