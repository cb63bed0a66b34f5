"""Heads of all kinds learn from what is served, also of a rounded target."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from speccompile import wrap
from speccompile.errors import InvalidHead, InvalidOption
from speccompile.heads import DFlashHead, Eagle3Head, MtpHead
from speccompile.training import OnlineTraining
from support.errors import raises
from support.families import family
from support.training_data import TAPS, learnable

K, NEW = 3, 29
SIZES: dict[str, Any] = {"tiers": (0, K), "max_len": 48, "max_batch": 2, "backend": "eager", "policy": f"fixed:{K}"}
LEARN = OnlineTraining(share=0.0, learning_rate=5e-3, ring_tokens=4096, judge_tokens=128, unroll=K)
BLOCK: dict[str, Any] = {"taps": TAPS, "block_size": K + 1, "mask_token_id": 31}
DSPARK = BLOCK | {"block_size": K, "sample_from_anchor": True, "markov_rank": 8, "draft_vocab_size": 24}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return learnable(kv_heads=2)


def head_of(kind: str, model: LlamaForCausalLM) -> tuple[str, nn.Module]:
    if kind == "MTP":
        return "mtp_eagle_one_model", MtpHead.random(model)
    if kind == "EAGLE-3":
        return "eagle3_one_model", Eagle3Head.random(model, taps=TAPS, draft_vocab_size=24)
    return "dflash", DFlashHead.random(model, **(DSPARK if kind == "DSpark" else BLOCK))


def prompts(count: int, seed: int) -> torch.Tensor:
    return torch.randint(32, (count, 3), generator=torch.Generator().manual_seed(seed))


def texts(spec: Any, ids: torch.Tensor) -> list[list[int]]:
    requests = [spec.engine.submit(prompt, max_new_tokens=NEW, eos_token_id=[]) for prompt in ids.tolist()]
    return [request.result().token_ids for request in requests]


@pytest.mark.parametrize("kind", ["DFlash", "DSpark", "MTP"])
def test_it_drafts_better_and_nothing_else_changes(kind: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    mode, head = head_of(kind, model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with wrap(model, "none", tiers=(0,), max_len=48, backend="eager") as plain:
        wanted = texts(plain, prompts(20, 1))
    with wrap(model, mode, draft=head, learn=LEARN, **SIZES) as spec:
        assert texts(spec, prompts(20, 1)) == wanted
        first = spec.stats.acceptance_length
        learnt = spec.learn(120)
        assert learnt.steps == 120 and learnt.taken and learnt.after.length(K) > learnt.before.length(K) + 0.3
        spec.stats.reset()
        assert texts(spec, prompts(20, 1)) == wanted
        assert spec.stats.acceptance_length > first + 0.3
        spec.save_head(tmp_path)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    with wrap(model, mode, draft=str(tmp_path), **SIZES) as loaded:
        assert texts(loaded, prompts(20, 1)) == wanted
        assert loaded.stats.acceptance_length > first + 0.3


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kind", ["EAGLE-3", "DSpark"])
def test_the_target_may_be_rounded(kind: str, model: LlamaForCausalLM) -> None:
    mode, head = head_of(kind, model)
    with wrap(model, mode, draft=head, learn=LEARN, weights="int8", **SIZES) as spec:
        wanted = texts(spec, prompts(20, 1))
        first = spec.stats.acceptance_length
        assert spec.learn(100).taken
        spec.stats.reset()
        assert texts(spec, prompts(20, 1)) == wanted
        assert spec.stats.acceptance_length > first + 0.3


def test_modules_that_training_does_not_support() -> None:
    target = family("gemma2")
    with raises(InvalidHead, reason=re.compile("soft cap")):
        wrap(target, "mtp_eagle_one_model", draft=MtpHead.random(target), learn=LEARN, **SIZES)


@pytest.mark.parametrize(
    "fields",
    [{"windows": (9,)}, {"taps": (0, 2)}, {"logit_scale": 0.5}, {"attention_bias": True}, {"causal": (True,)}],
    ids=str,
)
def test_a_block_that_training_does_not_support(fields: dict[str, Any], model: LlamaForCausalLM) -> None:
    head = DFlashHead.random(model, **BLOCK | fields)
    with raises(InvalidOption, where="wrap", name="learn"):
        wrap(model, "dflash", draft=head, learn=LEARN, **SIZES)
