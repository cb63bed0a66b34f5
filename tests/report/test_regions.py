"""Layers are taken apart by data flow, in every family."""

from __future__ import annotations

from collections import Counter

import pytest

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Pass, facts
from speccompile.passes.pipeline import Pipeline
from speccompile.passes.target.choose_attention import ChooseAttention
from speccompile.passes.target.choose_linear import KeepLinears
from speccompile.passes.target.outline import OutlineLayers
from speccompile.passes.target.outline_ends import OutlineEnds
from speccompile.report.regions import is_linear, op_name, regions_of_body
from support.families import model_of
from support.tiny import captured


def outlined(name: str, *more: Pass) -> StepGraph:
    passes = (ChooseAttention("attention"), KeepLinears(), OutlineLayers(), *more)
    return Pipeline(passes, facts("outlined")).finish(captured(model_of(name)).graph)


@pytest.mark.parametrize(
    ("name", "linears"),
    [
        ("llama", {"qkv": 3, "projection": 1, "mlp": 3}),
        ("gpt2", {"qkv": 1, "projection": 1, "mlp": 2}),
        # Attention and MLP read the same input, side by side.
        ("gpt_neox", {"qkv": 1, "projection": 1, "mlp": 2}),
    ],
)
def test_linears_belong_to_the_parts_of_a_layer(name: str, linears: dict[str, int]) -> None:
    graph = outlined(name)
    body = next(iter(graph.bodies.values()))
    regions = regions_of_body(graph, body)
    found = Counter(region for node, region in regions.items() if is_linear(node))
    assert found == linears
    assert [op_name(node) for node, region in regions.items() if region == "attention"] == ["speccompile.attention"]
    # The KV is written before it is attended to.
    writes = [node for node in regions if op_name(node) == "aten.index_put_"]
    assert writes and all(regions[node] == "qkv" for node in writes)


def test_bodies_around_the_layers_are_a_region_each() -> None:
    bodies = (graph := outlined("llama", OutlineEnds())).bodies
    regions = {name: set(regions_of_body(graph, body).values()) for name, body in bodies.items()}
    assert regions["prologue"] == {"embedding"} and regions["epilogue"] == {"lm_head"}
