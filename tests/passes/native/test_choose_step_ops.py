"""Steps made of single ops, as CUDA takes them, are steps that spell out what those compute."""

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
    "ngram": {"mode": "ngram"},
    "early_exit": {"mode": "early_exit", "exit_layer": 1},
    "rejection": {"mode": "early_exit", "exit_layer": 1, "acceptance": "rejection"},
    "typical": {"mode": "ngram", "acceptance": "typical"},
    "forced": {"mode": "ngram", "acceptance": Forced(accepted=1.6)},
    "none": {"mode": "none"},
    # What stands around the layers of the drafter is outlined, too.
    "head": {"mode": "eagle3_one_model", "draft": Eagle3Head.random(tiny_llama(), taps=(0, 1), draft_vocab_size=50)},
    "tree": {"mode": "draft_target", "draft": tiny_llama(), "tiers": (0, TREE), "policy": Fixed(TREE)},
}


def wrapped(monkeypatch: pytest.MonkeyPatch, *, step_ops: bool, mode: str, **options: Any) -> Speculator:
    if step_ops:
        monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: ON_CUDA)
    sizes: dict[str, Any] = {"tiers": (0, 3), "policy": "fixed:3", "max_batch": 2, "max_len": 40}
    spec = speccompile.wrap(tiny_llama(), mode, backend="eager", **sizes | options)
    monkeypatch.undo()
    return spec


@pytest.mark.parametrize("case", CASES)
def test_the_text_is_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for step_ops in (False, True):
        with wrapped(monkeypatch, step_ops=step_ops, **CASES[case]) as spec:
            own = []
            for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 4}):
                own.append(spec.generate(PROMPTS, max_new_tokens=30, eos_token_id=[3], pad_token_id=0, **options))
                own.append(torch.tensor([spec.stats.acceptance_length]))
            texts.append(own)
    for spelled, single in zip(*texts, strict=True):
        assert torch.equal(spelled, single)


def test_a_step_calls_one_op_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    with wrapped(monkeypatch, step_ops=True, mode="ngram", sampling=True) as spec:
        for name, tier in [*spec.engine.tiers.items(), *spec.engine.prefill_tiers.items()]:
            counts = tier.graph.op_counts()
            assert counts.get("speccompile.accept_commit_.default", 0) == ("inner" not in name), name
            assert counts["speccompile.match_ngram.default"] == 1
            # The match looks back by rolling the text; acceptance multiplies along the drafts.
            assert not any(op.startswith(("aten.roll", "aten.cumprod")) for op in counts)
        assert "use_step_ops" in spec.stages


def test_without_them_a_step_spells_out_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with wrapped(monkeypatch, step_ops=False, mode="ngram") as spec:
        names = [name for name in spec.tiers[3].graph.op_counts() if name.startswith("speccompile.")]
        assert not any("commit" in name or "ngram" in name for name in names) and "use_step_ops" not in spec.stages


@pytest.mark.parametrize("op", ["accept_commit_", "match_ngram", "attention"])
def test_cuda_has_a_kernel_for_each(op: str) -> None:
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"speccompile::{op}", key)


def test_cuda_takes_them() -> None:
    info = replace(inspect_model(tiny_llama()), device=torch.device("cuda"))
    assert choose_kernels(info) is ON_CUDA and ON_CUDA.step_ops
