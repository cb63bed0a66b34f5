"""Models that count positions from the cache's length on: captured, each row stands at its own."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import fx

import speccompile
from speccompile.errors import CaptureMismatch
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture import capture as capture_module
from speccompile.graph_capture.counted_positions import lookup, own_positions
from speccompile.graph_capture.model_info import inspect_model
from speccompile.graph_capture.observe import observe
from speccompile.utils.transformers_version import FROM_5_18
from support.errors import raises
from support.families import SIZES, greedy, model_of, periodic, speculative
from support.tiny import known_capture

# Learned positions after an offset, sines in a table, and a look-up by indexing.
FAMILIES = ("bart", "marian", "whisper")


@functools.cache
def captured_of(name: str) -> StepGraph:
    """Of a wrap, if it passed the check there."""
    return known_capture(model_of(name)).graph


def position_lookups(graph: StepGraph) -> list[fx.Node]:
    """Look-ups whose index is computed from the rows' positions."""

    def ancestors(node: fx.Node) -> set[fx.Node]:
        parents = [] if node.target is torch.ops.aten.sym_size.int else node.all_input_nodes
        return {node}.union(*(ancestors(parent) for parent in parents))

    found = [(node, lookup(node)) for node in graph.graph.nodes]
    return [node for node, use in found if use is not None and graph.anchors.positions in ancestors(use[1])]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_at_positions_of_their_own_have_the_text_of_transformers(name: str) -> None:
    model = model_of(name)
    with speccompile.wrap(model, "ngram", tiers=(0, 3), policy="fixed:3", **SIZES | {"max_batch": 3}) as spec:
        prompts = [periodic(seed=2)[:38], [9, 8, 7], periodic(seed=3)[:20]]
        assert speculative(spec, prompts) == [greedy(model, prompt) for prompt in prompts]
        assert spec.stats.accepted_tokens > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_look_up_reads_the_positions(name: str) -> None:
    graph = captured_of(name)
    (node,) = position_lookups(graph)
    rows, width = graph.sizes["B"], graph.sizes["T"]
    assert tuple(node.meta["val"].shape) == (rows, width, 64)


def test_without_it_the_capture_check_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "own_positions", lambda graph: graph)
    with raises(CaptureMismatch, model="BartForCausalLM", missing="position_ids"):
        speccompile.wrap(model_of("bart", num_layers=1), "none", tiers=(0,), max_len=63, backend="eager")


def test_models_that_take_positions_are_left_as_they_are() -> None:
    graph = captured_of("gpt2")
    again = own_positions(graph)
    assert [node.name for node in again.graph.nodes] == [node.name for node in graph.graph.nodes]


@pytest.mark.skipif(not FROM_5_18, reason="RoFormer is not causal before transformers 5.18")
def test_a_table_without_a_dimension_for_rows_is_left_as_it_is() -> None:
    # RoFormer's sines are [1, 1, T, D] for all rows.
    graph = captured_of("roformer")
    assert position_lookups(graph) == []
    with raises(CaptureMismatch, model="RoFormerForCausalLM", missing="position_ids"):
        speccompile.wrap(model_of("roformer"), "none", tiers=(0,), max_len=63, backend="eager")


@pytest.mark.parametrize(("name", "counts"), [("bart", True), ("llama4_text", True), ("gpt2", False), ("bloom", False)])
def test_a_model_that_reads_the_length_of_the_cache_is_known(name: str, counts: bool) -> None:
    model = model_of(name)
    assert observe(model, inspect_model(model)).counts == counts


def test_what_else_depends_on_the_count_is_checked_over_the_longest_text() -> None:
    # Llama 4 scales queries by the position that it counts, and does so from floor_scale on.
    model = model_of("llama4_text", floor_scale=60, attn_scale=1.0)
    with speccompile.wrap(model, "none", tiers=(0,), max_len=59, backend="eager") as spec:
        assert speculative(spec, [periodic(seed=2)[:30]]) == [greedy(model, periodic(seed=2)[:30])]
    with raises(CaptureMismatch, where=re.compile(r"first wrong is model\.layers\.\d \(Llama4TextDecoderLayer\)")):
        speccompile.wrap(model, "none", tiers=(0,), max_len=200, backend="eager")


def test_look_ups_of_every_kind_are_seen() -> None:
    def looks(table: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.nn.functional.embedding(index, table),
            table[index],
            table[:, index],
            table.index_select(0, index),
            torch.gather(table, 0, index[:, None]),
            table[index, index],
            table + index[:, None],
        )

    example = (torch.zeros(5, 5), torch.zeros(5, dtype=torch.int64))
    graph = torch.export.export(_Module(looks), example).graph
    dims = [lookup(node)[2] for node in graph.nodes if lookup(node) is not None]  # type: ignore[index]
    assert dims == [0, 0, 1, 0, 0]


class _Module(torch.nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> object:
        return self.function(*inputs)  # type: ignore[operator]
