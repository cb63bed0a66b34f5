"""``kv="bfloat16"``, ``kv="float16"`` and ``kv="int8"``: the text is the model's own over keys and values that are
rounded once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import speccompile
from speccompile import Adapters, Tree, wrap
from speccompile.errors import InvalidOption
from speccompile.graph_capture.rounded_kv import rounding_kv
from speccompile.heads import Eagle3Head
from speccompile.policies import Fixed
from speccompile.utils.kv_forms import KV_FORMS
from support.errors import raises
from support.families import NEW_TOKENS, SIZES, model_of, periodic, speculative
from support.our_kernels import our_kernels
from support.tiny import tiny_llama

ROUNDED = [form for form in KV_FORMS if form != "same"]
TREE = Tree.dynamic(7, 3, 3)
PROMPTS = [periodic(seed=2)[:38], periodic(seed=3)[:17], [7] * 33]


def rounded(given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``given [B, H, T, D]`` over the numbers of ``dtype``; for int8 those of llama.cpp's ``q8_0``, block by block."""
    if dtype is not torch.int8:
        return given.to(dtype).to(given.dtype)
    found = given.float().clone()
    for block in found.split(32, dim=-1):
        scale = (block.abs().amax(-1, keepdim=True) / 127).half().float()
        block.copy_(torch.where(scale == 0, 0, (block / scale).round() * scale))
    return found.to(given.dtype)


class RoundedCache(DynamicCache):
    """transformers' cache, which keeps what it receives in another dtype."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        super().__init__(config=model.config)
        self.kept_in = dtype

    def update(self, keys: torch.Tensor, values: torch.Tensor, *rest: Any, **options: Any) -> Any:
        kept = (rounded(given, self.kept_in) for given in (keys, values))
        return super().update(*kept, *rest, **options)


def own_texts(model: PreTrainedModel, form: str) -> list[list[int]]:
    """transformers' greedy texts over rounded keys and values."""
    texts = []
    for prompt in PROMPTS:
        ids, cache = torch.tensor([prompt]), RoundedCache(model, getattr(torch, form))
        options: dict[str, Any] = {"past_key_values": cache, "max_new_tokens": NEW_TOKENS, "do_sample": False}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


@pytest.fixture(scope="module", params=["torch's kernels", "our kernels"])
def sizes(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Options of a wrap whose steps run over these kernels."""
    if request.param == "torch's kernels":
        yield SIZES
        return
    with our_kernels() as backend:
        yield SIZES | {"backend": backend}


@pytest.mark.parametrize("form", ROUNDED)
# One with windows and a soft cap, one with experts, one whose attention is its own.
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "bloom"])
def test_texts_of_families(name: str, form: Any, sizes: dict[str, Any]) -> None:
    model = model_of(name)
    with wrap(model, "ngram", tiers=(0, 3), kv=form, **sizes) as spec:
        for draft_len in (0, 3):
            spec.engine.policy = Fixed(draft_len)
            assert speculative(spec, PROMPTS) == own_texts(model, form)
        assert spec.check(PROMPTS, max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize("form", ["float16", "int8"])
@pytest.mark.parametrize("mode", ["suffix", "eagle3_one_model", "draft_target", "early_exit"])
def test_texts_of_modes_in_chains_and_trees(mode: str, form: Any, sizes: dict[str, Any]) -> None:
    model = tiny_llama(layers=4)
    draft: dict[str, Any] = {
        "eagle3_one_model": {"draft": Eagle3Head.random(model, taps=(0, 1, 1))},
        "draft_target": {"draft": tiny_llama(seed=1)},
        "early_exit": {"exit_layer": 2},
    }
    trees = () if mode == "early_exit" else (TREE,)
    with wrap(model, mode, tiers=(0, 3, *trees), kv=form, **sizes, **draft.get(mode, {})) as spec:
        for tier in (0, 3, *trees):
            spec.engine.policy = Fixed(tier)
            assert speculative(spec, PROMPTS) == own_texts(model, form)


def test_the_check_is_against_the_rounded_model(sizes: dict[str, Any]) -> None:
    weights: Any = "int8" if sizes["backend"] == "ours" else "same"
    with wrap(tiny_llama(), "ngram", tiers=(0, 3), weights=weights, kv="bfloat16", **sizes) as spec:
        assert spec.check(PROMPTS, max_new_tokens=NEW_TOKENS)
        assert re.search(
            r"keys and values +rounded to bfloat16 when they are written, 256 bytes a token", spec.explain()
        )
        kept = [name for name in spec.engine.arena if re.fullmatch(r"[kv]_\d", name)]
        assert len(kept) == 4 and all(spec.engine.arena[name].dtype is torch.bfloat16 for name in kept)


def test_the_models_own_forward_reads_rounded_keys_and_values() -> None:
    model, ids = tiny_llama(), torch.tensor([PROMPTS[0]])
    wanted = model(ids, past_key_values=RoundedCache(model, torch.bfloat16)).logits
    with wrap(model, "ngram", tiers=(0, 3), kv="bfloat16", **SIZES) as spec:  # type: ignore[arg-type]
        found = spec(input_ids=ids, use_cache=False).logits
    assert torch.equal(found, wanted) and not torch.equal(found, model(ids).logits)


def test_drawn_texts_do_not_depend_on_the_tier(sizes: dict[str, Any]) -> None:
    ids = torch.tensor([PROMPTS[0]])
    with wrap(tiny_llama(), "ngram", tiers=(0, 3), kv="float16", **sizes) as spec:
        texts = []
        for draft_len in (0, 3):
            spec.engine.policy = Fixed(draft_len)
            options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "temperature": 1.2, "seed": 5}
            texts.append(spec.generate(ids, **options).tolist())
        assert texts[0] == texts[1]


def test_a_prefix_that_is_known_has_the_same_text() -> None:
    model = tiny_llama()
    with wrap(model, "ngram", tiers=(0, 3), kv="float16", **SIZES) as spec:  # type: ignore[arg-type]
        first, again = (speculative(spec, PROMPTS[:1]) for _ in range(2))
        assert first == again and spec.stats.requests[-1].reused_tokens > 0


def test_a_package_keeps_the_form(tmp_path: Path) -> None:
    model = tiny_llama()
    with wrap(model, "ngram", tiers=(0, 3), kv="bfloat16", **SIZES) as spec:  # type: ignore[arg-type]
        text = speculative(spec, PROMPTS)
        spec.save(tmp_path / "package")
    with speccompile.load(tmp_path / "package", model) as loaded:
        assert loaded.engine.arena["k_0"].dtype is torch.bfloat16
        assert speculative(loaded, PROMPTS) == text


@pytest.mark.parametrize("value", ["int3", None, torch.float16])
def test_other_forms_are_refused(value: Any) -> None:
    with raises(InvalidOption, name="kv", reason=re.compile("choose from same, bfloat16, float16, int8")):
        wrap(tiny_llama(), "ngram", kv=value, **SIZES)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ROUNDED)
def test_adapters_are_checked_over_rounded_keys_and_values(form: Any) -> None:
    with wrap(tiny_llama(), "ngram", tiers=(0, 3), kv=form, adapters=Adapters(2, 8), **SIZES) as spec:  # type: ignore[arg-type]
        assert spec.check(PROMPTS, max_new_tokens=NEW_TOKENS)


def test_keys_that_do_not_fit_are_refused() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1e6)
    with raises(InvalidOption, name="kv", value="float16", reason=re.compile("are not finite; use bfloat16")):
        wrap(model, "ngram", tiers=(0, 3), kv="float16", **SIZES)  # type: ignore[arg-type]
    with wrap(model, "ngram", tiers=(0, 3), kv="bfloat16", **SIZES) as spec:  # type: ignore[arg-type]
        assert spec.check(PROMPTS, max_new_tokens=NEW_TOKENS)


def test_forwards_of_other_threads_round_nothing() -> None:
    model, ids = tiny_llama(), torch.tensor([PROMPTS[0]])
    plain = model(ids, use_cache=True).logits
    with rounding_kv(torch.bfloat16), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(lambda: model(ids, use_cache=True).logits).result(), plain)
        assert not torch.equal(model(ids, use_cache=True).logits, plain)
    assert torch.equal(model(ids, use_cache=True).logits, plain)


def test_a_model_without_keys_and_values_is_refused() -> None:
    with raises(InvalidOption, name="kv", value="float16", reason=re.compile("keeps a recurrent state, and no keys")):
        wrap(model_of("mamba"), "none", tiers=(0,), kv="float16", **SIZES)  # type: ignore[arg-type]
