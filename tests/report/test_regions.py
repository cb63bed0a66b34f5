"""Layers are taken apart by data flow, in every family."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch

import speccompile
from speccompile.graph.step_graph import StepGraph
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.passes.base import Changes, Pass, facts
from speccompile.passes.pipeline import Pipeline
from speccompile.passes.target.choose_attention import ChooseAttention
from speccompile.passes.target.choose_linear import KeepLinears, PackLinears
from speccompile.passes.target.join_linears import JoinLinears
from speccompile.passes.target.outline import OutlineLayers
from speccompile.passes.target.outline_ends import OutlineEnds
from speccompile.passes.target.use_skinny_linears import UseSkinnyLinears
from speccompile.report.regions import (
    is_linear,
    op_name,
    regions_of_body,
    regions_of_passes,
    regions_of_step,
)
from speccompile.utils.weight_forms import WeightForms
from support.families import model_of
from support.tiny import known_capture


def passes_of_the_package() -> Iterator[type[Pass]]:
    """Those that are in a pipeline: abstract ones have no name."""
    for module in pkgutil.walk_packages(speccompile.__path__, "speccompile."):
        if {"passes", "modes", "acceptance", "adapters", "sampling"} & set(module.name.split(".")):
            importlib.import_module(module.name)
    left = [Pass]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if kind.__module__.startswith("speccompile.") and "name" in vars(kind):
            yield kind


def test_every_pass_of_the_package_declares_its_region() -> None:
    def declares(kind: type[Pass]) -> bool:
        return any("region" in vars(base) for base in kind.__mro__ if base is not Pass)

    assert [kind.name for kind in passes_of_the_package() if not declares(kind)] == []


def test_calls_of_a_pass_that_is_not_known_are_no_part_of_the_model() -> None:
    class Added(Pass):
        name, looks_for, provides = "added", "nothing", facts("something_new")

        def run(self, graph: StepGraph) -> Changes:
            return Changes(0)

    graph = known_capture(model_of("llama")).graph
    first, *_, last = [node for node in graph.graph.nodes if node.op == "call_function"]
    first.meta["pass"], last.meta["pass"] = "added", "one that is not listed"
    regions = regions_of_step(graph, regions_of_passes([Added()]))
    assert (regions.pop(first), regions.pop(last)) == ("other", "other")
    assert set(regions.values()) == {"embedding", "layers", "lm_head"}


def outlined(
    name: str, *more: Pass, linears: Sequence[Pass] = (KeepLinears(),), dtype: torch.dtype = torch.float32
) -> StepGraph:
    passes = (ChooseAttention("attention"), *linears, OutlineLayers(), *more)
    return Pipeline(passes, facts("outlined")).finish(known_capture(model_of(name).to(dtype)).graph)


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


@pytest.mark.parametrize("weights", ["same", "int8", "int4", "skinny"])
def test_every_op_that_is_a_linear_has_its_part_of_a_layer(weights: str) -> None:
    skinny: list[Pass] = [KeepLinears(), UseSkinnyLinears()]
    linears = skinny if weights == "skinny" else [PackLinears(WeightPacks(WeightForms(weights))), JoinLinears()]
    graph = outlined("llama", linears=linears, dtype=torch.bfloat16 if weights == "skinny" else torch.float32)
    regions = regions_of_body(graph, next(iter(graph.bodies.values())))
    found = Counter(region for node, region in regions.items() if is_linear(node))
    # Linears of one input are one call of their packs.
    joined = {"qkv": 1, "projection": 1, "mlp": 2}
    assert found == ({"qkv": 3, "projection": 1, "mlp": 3} if weights == "skinny" else joined)


def test_bodies_around_the_layers_are_a_region_each() -> None:
    bodies = (graph := outlined("llama", OutlineEnds())).bodies
    regions = {name: set(regions_of_body(graph, body).values()) for name, body in bodies.items()}
    assert regions["prologue"] == {"embedding"} and regions["epilogue"] == {"lm_head"}
