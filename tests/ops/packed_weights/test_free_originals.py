"""``free_originals=True``: the model's weights become the packs, and there is one copy."""

from __future__ import annotations

import copy
import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import isolated
from speccompile.errors import ModelChanged, OriginalsFreed, WeightsReplaced
from speccompile.hidden_states.target_id import target_id
from speccompile.lowering import kernels
from speccompile.ops.cpu.forms.same import Same
from speccompile.pretrained import fetch_smollm2
from support.errors import raises
from support.packed_models import MODELS, PROMPTS, alive, greedy, watched, with_freed_originals, wrapped
from support.tiny import tiny_llama


@pytest.mark.parametrize("name", ["untied", "tied", "gpt2"])
def test_one_copy_is_left(name: str) -> None:
    """An object that still held a weight of the model (a stage, a port, a sample of it) would keep its storage."""
    model = MODELS[name]()
    refs = watched(model)
    matrices = {path for path, parameter in model.named_parameters() if parameter.dim() == 2}
    if name == "gpt2":
        matrices -= {"transformer.wpe.weight"}
    elif name == "untied":
        matrices -= {"model.embed_tokens.weight"}
    spec = with_freed_originals(model)
    spec.generate(PROMPTS, max_new_tokens=8)
    gc.collect()
    assert set(refs) - alive(refs) == matrices
    assert f"originals freed: {len(matrices)} of them in {spec._build.packs.nbytes / 2**20:.1f} MiB" in spec.explain()


def test_what_is_not_freed_keeps_its_weights() -> None:
    model = tiny_llama()
    refs = watched(model)
    spec = with_freed_originals(model, free_originals=False)
    assert alive(refs) == set(refs) and "originals freed" not in spec.explain()


@pytest.mark.parametrize("tie", [False, True])
def test_explain_says_that_packed_weights_are_a_second_copy(tie: bool) -> None:
    model = tiny_llama(tie=tie)
    spec = wrapped(model)
    matrices = {weight.data_ptr(): weight.nbytes for weight in model.parameters() if weight.dim() == 2}
    if not tie:
        del matrices[model.model.embed_tokens.weight.data_ptr()]
    packed, own = spec._build.packs.nbytes / 2**20, sum(matrices.values()) / 2**20
    explained = spec.explain()
    assert f"a second copy of {packed:.1f} MiB beside the model's own {own:.1f} MiB" in explained
    assert f"free_originals=True keeps one copy and saves {own:.1f} MiB" in explained


@pytest.mark.parametrize(("tie", "form"), [(False, "int8"), (True, "int4")])
def test_the_report_says_what_rounding_saves(tie: bool, form: str) -> None:
    """A table of embeddings that is not tied has a packed copy only if it is rounded."""
    model = tiny_llama(tie=tie)
    spec = wrapped(model)
    saved = {saving.option: saving.nbytes for saving in spec.report().memory.savings}
    less = spec._build.packs.nbytes - wrapped(model, weights=form)._build.packs.nbytes
    assert saved[f'weights="{form}"'] == less


def test_explain_says_that_unpacked_weights_are_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda _, info: kernels.STOCK)
    explained = wrapped(tiny_llama()).explain()
    assert "the model's own, in one copy" in explained and "second copy" not in explained


def test_the_pack_is_what_the_model_has() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    spec = with_freed_originals(model)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    tiers = [*spec.engine.tiers.values(), *spec.prefill.values()]
    for tier in tiers:
        for name, tensor in zip(tier.argument_names, tier.arguments, strict=True):
            assert not name.endswith("_packed") or tensor.data_ptr() in own
    assert model.lm_head.parametrizations.weight.original is model.model.embed_tokens.parametrizations.weight.original


def test_they_go_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There never are two whole copies: when a weight is packed, those packed before are gone."""
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path)
    refs: dict[str, Any] = {}
    left = []
    pack = Same.pack
    # Thirty collections follow: they need not look through what is here by now.
    gc.collect()
    gc.freeze()

    def noted(form: Same, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gc.collect()
        left.append(len(alive(refs)))
        return pack(form, weight)

    monkeypatch.setattr(Same, "pack", noted)
    for came in ("exported", "read from the store"):
        model = tiny_llama()
        refs = watched(model)
        left.clear()
        spec = with_freed_originals(model, tiers=(0,), max_batch=1, max_len=8)
        assert spec.stages["capture"].note == came
        assert left == list(range(len(refs), len(refs) - 15, -1))


@pytest.mark.parametrize("name", MODELS)
def test_the_text_is_the_models_own(name: str) -> None:
    model = MODELS[name]()
    wanted = greedy(copy.deepcopy(model), new=20)
    plain = copy.deepcopy(model)
    spec = with_freed_originals(model)
    with torch.no_grad():
        assert torch.equal(model(PROMPTS).logits, plain(PROMPTS).logits)
    assert torch.equal(greedy(model, new=20), wanted)
    assert target_id(model) == target_id(plain) == spec.target_id
    assert (
        spec.check(PROMPTS, max_new_tokens=20, eos_token_id=[]).largest_logit_change <= 2**-4
    )  # A unit in the last place of bfloat16.
    if name != "bfloat16":
        for draft_len in (0, 3):
            spec.set_tier(draft_len)
            assert torch.equal(spec.generate(PROMPTS, max_new_tokens=20, eos_token_id=[]), wanted)


@pytest.mark.parametrize("form", ["same", "int4"])
def test_every_stage_runs(form: str) -> None:
    spec = with_freed_originals(tiny_llama(), weights=form)
    for stage in spec.stages.values():
        stage.call(*stage.make_inputs())
    spec.generate(PROMPTS, max_new_tokens=4, do_sample=True, seed=1)


def test_it_cannot_be_wrapped_again() -> None:
    model = tiny_llama()
    with with_freed_originals(model) as spec:
        spec.generate(PROMPTS, max_new_tokens=4)
    for freed in (False, True):
        with raises(OriginalsFreed, what=re.compile("cannot be wrapped again")):
            with_freed_originals(model, free_originals=freed)


def test_what_becomes_of_other_wraps_of_the_model() -> None:
    model = tiny_llama()
    before = with_freed_originals(model, free_originals=False)
    spec = with_freed_originals(model)
    with raises(ModelChanged, what=re.compile(r"was added|is Parametrized")):
        before.generate(PROMPTS)
    spec.generate(PROMPTS, max_new_tokens=4)


def test_its_weights_cannot_be_changed() -> None:
    model = tiny_llama()
    spec = with_freed_originals(model)
    up = model.model.layers[0].mlp.up_proj
    with raises(OriginalsFreed, what=re.compile("cannot be assigned to")):
        up.weight = torch.zeros_like(up.weight)
    with raises(OriginalsFreed, what=re.compile("cannot be loaded anew")):
        model.load_state_dict(tiny_llama(seed=1).state_dict(), strict=False)
    spec.generate(PROMPTS, max_new_tokens=4)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"), torch.no_grad():
        up.weight.mul_(2)
    model.double()
    with pytest.raises(WeightsReplaced):
        spec.generate(PROMPTS)


@pytest.mark.parametrize("form", ["same", "int8"])
def test_the_model_can_be_trained_through_what_is_left(form: str) -> None:
    model = tiny_llama()
    with_freed_originals(model, weights=form)
    model(PROMPTS, labels=PROMPTS).loss.backward()
    assert model.model.norm.weight.grad is not None


@pytest.mark.parametrize("name", ["tied", "gpt2"])
def test_it_can_be_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    wanted = greedy(model, new=20)
    with_freed_originals(model)
    state = model.state_dict()
    assert state.keys() == plain.keys() and all(torch.equal(state[key], plain[key]) for key in plain)
    model.save_pretrained(tmp_path)
    assert torch.equal(greedy(AutoModelForCausalLM.from_pretrained(tmp_path), new=20), wanted)


@pytest.mark.real
def test_memory_of_five_tiers() -> None:
    """1.3 times the weights, the KV, and 600 MB for Python, torch, transformers and what the build needs besides."""
    max_len, width = 2048, 16
    config = AutoConfig.from_pretrained(fetch_smollm2())
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * (max_len + width) * 2 * 4
    weights = 134_515_008 * 4
    arguments = ["--tiers", "0,1,3,7,15", "--max-len", str(max_len), "--free-originals"]
    most = 1.3 * weights + kv + 600e6

    def peak() -> float:
        return isolated.run(isolated.SPECULATOR, str(fetch_smollm2()), arguments, {})["peak_rss_bytes"]

    # A first build generates code, which needs about 100 MB of its own.
    assert peak() <= most or peak() <= most
