"""Steps whose ops are joined because a launch costs time, as on CUDA, compute what other steps compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import speccompile
from speccompile import Tree
from speccompile.acceptance import Forced
from speccompile.graph_capture.model_info import inspect_model
from speccompile.heads import Eagle3Head
from speccompile.lowering.kernels import ON_CUDA, choose_kernels
from speccompile.policies import Fixed
from speccompile.speculator.speculator import Speculator
from support.tiny import tiny_llama

PROMPTS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 1, 9, 1, 9, 1, 2, 3, 9, 1]])

TREE = Tree.dynamic(6, 3, 2)
CASES: dict[str, dict[str, Any]] = {
    "rejection": {"mode": "early_exit", "exit_layer": 1, "acceptance": "rejection"},
    "typical": {"mode": "ngram", "acceptance": "typical"},
    "forced": {"mode": "ngram", "acceptance": Forced(accepted=1.6)},
    "none": {"mode": "none"},
    # What stands around the layers of the drafter is outlined, too.
    "head": {"mode": "eagle3_one_model", "draft": Eagle3Head.random(tiny_llama(), taps=(0, 1), draft_vocab_size=50)},
    "tree": {"mode": "draft_target", "draft": tiny_llama(), "tiers": (0, TREE), "policy": Fixed(TREE)},
}


def wrapped(monkeypatch: pytest.MonkeyPatch, *, as_on_cuda: bool, mode: str, **options: Any) -> Speculator:
    if as_on_cuda:
        monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: ON_CUDA)
    sizes: dict[str, Any] = {"tiers": (0, 3), "policy": "fixed:3", "max_batch": 2, "max_len": 40}
    spec = speccompile.wrap(tiny_llama(), mode, backend="eager", **sizes | options)
    monkeypatch.undo()
    return spec


@pytest.mark.parametrize("case", CASES)
def test_the_text_is_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for as_on_cuda in (False, True):
        with wrapped(monkeypatch, as_on_cuda=as_on_cuda, **CASES[case]) as spec:
            own = []
            for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 4}):
                own.append(spec.generate(PROMPTS, max_new_tokens=30, eos_token_id=[3], pad_token_id=0, **options))
                own.append(torch.tensor([spec.stats.acceptance_length]))
            texts.append(own)
    for separate, joined in zip(*texts, strict=True):
        assert torch.equal(separate, joined)


@pytest.mark.parametrize("as_on_cuda", [False, True])
def test_a_step_calls_one_op_for_each(monkeypatch: pytest.MonkeyPatch, as_on_cuda: bool) -> None:
    with wrapped(monkeypatch, as_on_cuda=as_on_cuda, mode="ngram", sampling=True) as spec:
        for name, tier in [*spec.engine.tiers.items(), *spec.engine.prefill_tiers.items()]:
            counts = tier.graph.op_counts()
            assert counts.get("speccompile.accept_commit_.default", 0) == ("inner" not in name), name
            assert counts["speccompile.match_ngram.default"] == 1
            # The match looks back by rolling the text; acceptance multiplies along the drafts.
            assert not any(op.startswith(("aten.roll", "aten.cumprod")) for op in counts)


@pytest.mark.parametrize("op", ["accept_commit_", "match_ngram", "attention"])
def test_cuda_has_a_kernel_for_each(op: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"speccompile::{op}", "CUDA")


def test_cuda_takes_them() -> None:
    info = replace(inspect_model(tiny_llama()), device=torch.device("cuda"))
    assert choose_kernels(info) is ON_CUDA
