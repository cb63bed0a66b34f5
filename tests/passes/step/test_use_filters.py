"""Steps of the kind ``drawn``, as CUDA has them: temperature, top-k, top-p and min-p are one op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import speccompile
from speccompile import Tree
from speccompile.graph.keys import Kind
from speccompile.graph.step_graph import StepGraph
from speccompile.lowering.kernel_list import STEP, kernels_called
from speccompile.lowering.kernels import ON_CUDA
from speccompile.modes import registry
from speccompile.policies import Fixed
from speccompile.speculator.speculator import Speculator
from support.tiny import tiny_llama
from support.tree_drafter import STRIDE, Branching

PROMPTS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 1, 9, 1, 9, 1, 2, 3, 9, 1]])
DRAWN: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3, "top_k": 0},
    "all": {"temperature": 1.3, "top_k": 60, "top_p": 0.9, "min_p": 0.01},
}
TREE = Tree.dynamic(nodes=5, depth=3, branches=2)
MODES: dict[str, dict[str, Any]] = {
    "drafts drawn": {"mode": "early_exit", "exit_layer": 1},
    "tree": {"mode": "draft_target", "tiers": (0, TREE), "policy": Fixed(TREE)},
    "typical": {"mode": "ngram", "acceptance": "typical"},
}


def wrapped(monkeypatch: pytest.MonkeyPatch, mode: str, **options: Any) -> Speculator:
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: ON_CUDA)
    given: dict[str, Any] = {"tiers": (0, 3), "policy": "fixed:3", "max_batch": 2, "max_len": 40} | options
    if mode == "draft_target":
        given["draft"] = tiny_llama(seed=1, layers=1)
    spec = speccompile.wrap(tiny_llama(), mode, backend="eager", **given)
    monkeypatch.undo()
    return spec


@pytest.fixture(params=MODES)
def spec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Speculator]:
    with wrapped(monkeypatch, **MODES[request.param]) as spec:
        yield spec


def built(spec: Speculator) -> set[Kind]:
    return {kind for *_, kind in spec.engine.tiers}


def text(spec: Speculator, **options: Any) -> list[int]:
    return spec.engine.submit(PROMPTS[0], max_new_tokens=25, eos_token_id=[], seed=4, **options).result().token_ids


def test_few_options_build_no_other_processors_and_draw_the_same_text(spec: Speculator) -> None:
    """A neighbour that uses another processor makes the row one of a sampled step."""
    alone = {name: text(spec, do_sample=True, **options) for name, options in DRAWN.items()}
    assert built(spec) == {"greedy", "drawn"}
    ops = Counter(op for tier in spec.engine.tiers.values() for op in tier.graph.op_counts())
    assert not {"speccompile.repetition_penalty_.default", "speccompile.top_k_.default"} & ops.keys()
    for name, options in DRAWN.items():
        neighbour = spec.engine.submit(PROMPTS[1], max_new_tokens=28, eos_token_id=[], repetition_penalty=1.3)
        assert text(spec, do_sample=True, **options) == alone[name]
        neighbour.result()
    assert built(spec) == {"greedy", "drawn", "sampled"}


def launches(graph: StepGraph) -> Counter[str]:
    """Of one run on CUDA outside of the target's bodies."""
    called = kernels_called(graph, "cuda", {})
    assert not [call.name for call in called if call.kind == "plain"]
    return Counter({call.name: call.calls for call in called if call.caller == STEP})


def test_a_temperature_costs_at_most_six_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_modes", dict(registry._modes) | {"branching": Branching})
    with wrapped(monkeypatch, "branching", tiers=(0, 3, TREE), texts=(5,) * STRIDE) as spec:
        spec.engine.prepare("drawn")
        steps = {**spec.engine.tiers, **spec.engine.prefill_tiers}
        for (*name, kind), tier in steps.items():
            if kind == "drawn":
                greedy = launches(steps[(*name, "greedy")].graph)
                assert launches(tier.graph).total() - greedy.total() <= 6, name
