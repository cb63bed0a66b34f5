"""Options of a wrap that do not fit the model, the mode or one another.

Nothing is captured: each check is called by itself, or in a plan. Other checks are tested beside their option.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, cast

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import modes
from speccompile.acceptance import choose_rule
from speccompile.adapters.options import Adapters
from speccompile.compiler.option_checks import (
    check_adapters,
    check_backend,
    check_trees,
    check_unsharded,
    check_weights,
)
from speccompile.compiler.options import WrapOptions
from speccompile.compiler.sharding import NO_DIGEST
from speccompile.errors import FreeOriginalsUnavailable, InvalidOption, InvalidTiers
from speccompile.graph.tree import Tree
from speccompile.graph_capture.model_info import inspect_model
from speccompile.heads import Eagle3Head
from speccompile.hidden_states import SaveHiddenStates
from speccompile.lowering.kernels import ON_CUDA, STOCK, Kernels
from speccompile.modes.base import Mode
from speccompile.ops.cpu.quantized import QuantizedPacks
from speccompile.ranks.ranks import Ranks
from speccompile.training import OnlineTraining
from support.errors import raises
from support.plans import planned
from support.quantized import quantized
from support.tiny import tiny_llama

#: As if they were built.
CPP_OPS = Kernels(True, "ours")
LEARN = OnlineTraining()
SIZES: dict[str, Any] = {"tiers": (0, 2), "max_len": 64, "backend": "eager"}


@pytest.fixture(scope="module")
def head(model: LlamaForCausalLM) -> Eagle3Head:
    return Eagle3Head.random(model, taps=(0, 1, 1))


@pytest.fixture
def cpp_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans find the C++ ops, without waiting for a compiler."""
    choose_kernels(monkeypatch, CPP_OPS)


def choose_kernels(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: kernels)


def mode_named(name: str) -> Mode:
    return cast(Mode, modes.create(name, {}))


# --- the device and the ranks ---------------------------------------------------------------------


def test_trees_need_a_device_that_the_mode_proposes_them_on(model: LlamaForCausalLM) -> None:
    options = WrapOptions.of({"tiers": (0, Tree.static([(0,), (1,)]))})
    on_cpu = inspect_model(model)
    on_cuda = dataclasses.replace(on_cpu, device=torch.device("cuda"))
    check_trees(options, mode_named("ngram"), choose_rule("exact"), on_cpu)
    check_trees(options, mode_named("suffix"), choose_rule("exact"), on_cuda)
    reason = "there are trees, and mode 'ngram' only proposes them on cpu"
    with raises(InvalidTiers, tiers=options.draft_lens, reason=reason):
        check_trees(options, mode_named("ngram"), choose_rule("exact"), on_cuda)


def test_a_mode_needs_a_device_of_the_backend() -> None:
    check_backend(mode_named("suffix"), "inductor")
    with raises(InvalidOption, where="wrap", name="backend", value="cudagraph", reason="its drafter only runs on cpu"):
        check_backend(mode_named("suffix"), "cudagraph")


def test_a_sharded_model_saves_no_hidden_states() -> None:
    check_unsharded(mode_named("none"), None)
    with raises(InvalidOption, where="wrap", name="mode", value="none", reason=re.compile(re.escape(NO_DIGEST))):
        check_unsharded(mode_named("none"), cast(Ranks, object()))


# --- weights --------------------------------------------------------------------------------------


def test_quantised_weights_are_not_freed(model: LlamaForCausalLM) -> None:
    """The model's own values of them are released without that option."""
    options = WrapOptions(weights=QuantizedPacks.of_weights(quantized(model, "Q8_0")), free_originals=True)
    reason = "the model's own values of the Q8_0 weights are released without it"
    with raises(FreeOriginalsUnavailable, reason=reason, advice="; there is one copy of them then, too"):
        check_weights(options, CPP_OPS, "eager", inspect_model(model))


def test_a_drafters_weights_are_rounded_where_a_kernel_reads_them(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_kernels(monkeypatch, ON_CUDA)
    planned(model, "draft_target", draft="self:int8", **SIZES)
    choose_kernels(monkeypatch, STOCK)
    reason = re.compile("it needs the C\\+\\+ ops, and linears run on torch's own")
    with raises(InvalidOption, where="mode 'draft_target'", name="draft", value="self:int8", reason=reason):
        planned(model, "draft_target", draft="self:int8", **SIZES)


def test_a_drafters_weights_are_not_sharded(model: LlamaForCausalLM) -> None:
    head = Eagle3Head.random(model, taps=(0, 1, 1))
    planned(model, "eagle3_one_model", draft=head, **SIZES)
    # What a sharded parameter has: a real one needs a process group.
    cast(Any, next(head.parameters())).to_local = None
    with raises(InvalidOption, where="wrap", name="draft", value="Eagle3Head", reason=re.compile("are sharded")):
        planned(model, "eagle3_one_model", draft=head, **SIZES)


# --- learning from what is served -----------------------------------------------------------------


@pytest.mark.usefixtures("cpp_ops")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tiers": (0,)}, "no tier has drafts; give tiers with a draft length above 0"),
        (
            {"acceptance": "typical"},
            "with the acceptance rule 'typical' the text depends on the drafts; use acceptance='exact'",
        ),
        (
            {"free_originals": True},
            "the head learns from the model's own weights, which free_originals=True frees; use free_originals=False",
        ),
        (
            {"save_hidden_states": SaveHiddenStates("records", eagle3_layers_to_capture=(0,))},
            "hidden states are kept for save_hidden_states; leave one of the two out",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_head_cannot_learn_beside(
    model: LlamaForCausalLM, head: Eagle3Head, options: dict[str, Any], reason: str
) -> None:
    planned(model, "eagle3_one_model", draft=head, learn=LEARN, **SIZES)
    with raises(InvalidOption, where="wrap", name="learn", value=LEARN, reason=reason):
        planned(model, "eagle3_one_model", draft=head, learn=LEARN, **SIZES | options)


def test_a_mode_without_a_head_does_not_learn(model: LlamaForCausalLM) -> None:
    reason = "mode 'ngram' has no head that can be trained; use a mode with an EAGLE-3, MTP or DFlash head"
    with raises(InvalidOption, where="wrap", name="learn", value=LEARN, reason=reason):
        planned(model, "ngram", learn=LEARN, **SIZES)


def test_ranks_that_cudas_kernel_has_no_memory_for_are_refused_there() -> None:
    on_cpu = inspect_model(tiny_llama())
    on_cuda = dataclasses.replace(on_cpu, device=torch.device("cuda", 0))
    largest, larger = (WrapOptions(adapters=Adapters(1, max_rank=rank)) for rank in (256, 257))
    check_adapters(largest, None, on_cuda)
    check_adapters(larger, None, on_cpu)
    with raises(InvalidOption, name="adapters", reason="max_rank must be at most 256 on cuda"):
        check_adapters(larger, None, on_cuda)
