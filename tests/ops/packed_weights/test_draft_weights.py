"""``draft_weights="auto"``: when a drafter's linears are rounded without being asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.heads import Eagle3Head
from speccompile.lowering import backends
from speccompile.lowering.kernels import STOCK
from speccompile.training import OnlineTraining
from support.packed_models import NEW, PROMPTS, greedy
from support.tiny import tiny_llama

OF_HEAD, OF_MODEL = (f"rounded to {form}; the text does not depend on drafts" for form in ("int4", "int8"))
OWN = "the network's own"
SIZES: dict[str, Any] = {"tiers": (0, 3), "max_batch": 2, "max_len": 60, "backend": "eager"}
#: Of a wrap that writes no text.
LEAST: dict[str, Any] = {"tiers": (0, 1), "max_batch": 1, "max_len": 16, "backend": "eager"}


def head_of(model: LlamaForCausalLM) -> Eagle3Head:
    return Eagle3Head.random(model, taps=(0, 1, 1))


def said(spec: Speculator) -> str | None:
    (line,) = [line for line in spec.explain().splitlines() if line.startswith("draft weights")] or [""]
    return line.removeprefix("draft weights").strip() or None


@pytest.mark.parametrize("mode", ["eagle3", ["suffix", "eagle3_one_model"]])
def test_a_head_is_rounded_and_the_text_is_the_targets(model: LlamaForCausalLM, mode: Any) -> None:
    with wrap(model, mode, draft=head_of(model), policy="fixed:3", **SIZES) as spec:
        assert said(spec) == OF_HEAD
        assert torch.equal(spec.generate(PROMPTS, max_new_tokens=NEW), greedy(model))
        assert spec.stats.draft_tokens > 0


@pytest.mark.parametrize("weights", ["same", "int4"])
def test_a_draft_model_is_rounded_whatever_the_targets_weights_are(model: LlamaForCausalLM, weights: str) -> None:
    with wrap(model, "draft_target", draft=tiny_llama(), weights=weights, **LEAST) as spec:
        assert said(spec) == OF_MODEL


@pytest.mark.parametrize(
    "options",
    [
        {"draft_weights": "same"},
        {"acceptance": "rejection"},
        {"acceptance": "typical"},
        {"learn": OnlineTraining()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_weights_that_stay(model: LlamaForCausalLM, options: dict[str, Any]) -> None:
    with wrap(model, "eagle3_one_model", draft=head_of(model), **LEAST, **options) as spec:
        assert said(spec) == OWN


def test_originals_that_are_freed_stay() -> None:
    model = tiny_llama()
    with wrap(model, "eagle3_one_model", draft=head_of(model), free_originals=True, **LEAST) as spec:
        assert said(spec) == OWN


@pytest.mark.parametrize("weights", ["same", "int8"])
def test_a_target_that_drafts_for_itself_stays(model: LlamaForCausalLM, weights: str) -> None:
    with wrap(model, "draft_target", draft=model, weights=weights, **LEAST) as spec:
        assert said(spec) == OWN


def test_torchs_own_kernels_round_nothing(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.Eager, "choose_kernels", lambda *_: STOCK)
    with wrap(model, "eagle3_one_model", draft=head_of(model), **LEAST) as spec:
        assert said(spec) == OWN


def test_a_mode_without_a_network_says_nothing(model: LlamaForCausalLM) -> None:
    with wrap(model, "ngram", **SIZES) as spec:
        assert said(spec) is None
