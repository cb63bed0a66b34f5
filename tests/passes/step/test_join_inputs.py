"""Where launches cost, a step has few calls outside of its layers, and the same text."""

from __future__ import annotations

from typing import Any

import pytest

import speccompile
from speccompile.lowering.kernels import ON_CUDA
from speccompile.speculator.speculator import Speculator
from support.own_passes import own
from support.tiny import tiny_llama


def wrapped(monkeypatch: pytest.MonkeyPatch, mode: str, **options: Any) -> Speculator:
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: ON_CUDA)
    return speccompile.wrap(tiny_llama(), mode, backend="eager", tiers=(0, 3), max_batch=2, max_len=40, **options)


def calls(spec: Speculator, draft_len: int) -> dict[str, int]:
    return spec.engine.tiers[draft_len, 1, "greedy"].graph.op_counts()


@pytest.mark.parametrize("draft_len", [0, 3])
def test_a_greedy_step_has_one_call_for_each_of_its_parts(monkeypatch: pytest.MonkeyPatch, draft_len: int) -> None:
    with wrapped(monkeypatch, "ngram") as spec:
        found = calls(spec, draft_len)
    launching = {name for name in found if not name.endswith("getitem>") and "alias" not in name}
    ours = ("step_inputs", "choose", "accept_commit_", "match_ngram", "store_drafts_")
    expected = {f"speccompile.{op}.default" for op in ours} | {"prologue", "epilogue"}
    # The last layer has no norm after it.
    expected |= {"decoder_layer", "decoder_layer_1"}
    assert launching - {"aten.slice.Tensor"} == expected | {"aten.linear.default"}
    assert all(found[name] == 1 for name in expected - {"decoder_layer"})


def test_drafts_that_another_pass_made_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with wrapped(monkeypatch, "early_exit", exit_layer=1) as spec:
        graph = spec.engine.tiers[3, 1, "greedy"].graph
    (node,) = (node for node in graph.graph.nodes if str(node.target) == "speccompile.step_inputs.default")
    drafts, lens, limit, draft_limit = node.args[3:7]
    assert [item.meta["pass"] for item in (drafts, lens)] == ["draft_early_exit"] * 2
    assert limit is None and draft_limit.name == "draft_limit"
    assert graph.values["drafts"].meta["pass"] == "join_inputs"


def test_a_step_that_a_users_pass_may_have_changed_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    with wrapped(monkeypatch, "ngram", passes=[own()]) as spec:
        assert "speccompile.step_inputs.default" not in calls(spec, 3)
