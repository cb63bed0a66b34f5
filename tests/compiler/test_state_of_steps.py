"""The state tensors of a wrap are those that its passes declare."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Tree
from speccompile.compiler.layout import state_specs
from speccompile.graph.state import N, StateSpec
from speccompile.passes.step.commit import Commit
from speccompile.passes.step.judge_chain import tree_outcome_state
from support.plans import planned


def test_only_steps_of_trees_have_the_state_of_their_passes(model: LlamaForCausalLM) -> None:
    own = {spec.name for spec in tree_outcome_state()}
    for tiers, present in (((0, 2), set()), ((0, Tree.dynamic(4, 2, 2)), own)):
        config = planned(model, "ngram", tiers=tiers, max_len=16, backend="eager").config
        assert {spec.name for spec in state_specs(config, 128)} & own == present


def test_a_state_tensor_of_several_pipelines_is_one(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = StateSpec("commits", (N,), torch.int64)
    monkeypatch.setattr(Commit, "state_specs", lambda _: [declared])
    config = planned(model, "ngram", tiers=(0, 2), max_len=16, backend="eager").config
    assert state_specs(config, 128).count(declared) == 1
