"""Where adapters stand in the captured model: beside which linears, in how many ops."""

from __future__ import annotations

import operator

import torch

from speccompile import Adapters
from speccompile.adapters.buffers import AdapterBuffers, slot_state
from speccompile.graph.arena import Arena
from speccompile.graph.layer_state import kv_state
from speccompile.graph.state import core_state, resolve_layout
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.capture import capture
from speccompile.graph_capture.model_info import inspect_model
from speccompile.graph_capture.observe import observe
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.passes.pipeline import Pipeline
from speccompile.passes.target.add_adapters import AddAdapters
from speccompile.passes.target.choose_linear import PackLinears
from speccompile.passes.target.join_linears import JoinLinears
from support.tiny import tiny_llama

OPS = torch.ops.speccompile


def graph_with(adapters: Adapters, *after: object) -> StepGraph:
    model = tiny_llama(attention_bias=True)
    info = inspect_model(model)
    observed, buffers = observe(model, info), AdapterBuffers.of(model, info, adapters)
    layout = resolve_layout(
        [*core_state(info.vocab_size), *kv_state(observed.kv), *slot_state(buffers.count), *buffers.state()],
        max_batch=2,
        max_len=64,
        max_draft_len=3,
        max_width=4,
        vocab_size=info.vocab_size,
    )
    Arena(layout, info.device)
    passes = (AddAdapters(buffers, native=True), *after)
    return Pipeline(passes, frozenset()).run(capture(model, info, observed, layout))[0]  # type: ignore[arg-type]


def test_linears_that_read_one_input_share_an_op() -> None:
    graph = graph_with(Adapters(3))
    calls = graph.graph.find_nodes(op="call_function", target=OPS.native_lora.default)
    # Queries, keys and values; o; gate and up; down: in each of two layers.
    assert [len(call.args[1]) for call in calls] == [3, 1, 2, 1] * 2
    for call in calls:
        linears, first = call.args[1], call.args[6]
        assert all(linear.args[0] is call.args[0] for linear in linears)
        for number, (linear, a) in enumerate(zip(linears, call.args[2], strict=True)):
            # The buffers are those of the very weight that the linear reads.
            path = linear.args[1].name.removesuffix("_weight")
            assert path.removeprefix("model_layers_") == a.name.removeprefix("lora_").removesuffix("_a")
            assert all(user is call for user in linear.users)
            index = next(user for user in call.users if user.args[1] == number)
            assert index.target is operator.getitem and index.users
        assert first in (0, 3, 4, 6) and call.args[7] is graph.values["row_adapters"]


def test_only_the_named_linears_are_adapted() -> None:
    graph = graph_with(Adapters(1, modules=("q_proj", "v_proj", "down_proj")))
    calls = graph.graph.find_nodes(op="call_function", target=OPS.native_lora.default)
    assert [[linear.args[1].name.split("_")[-3] for linear in call.args[1]] for call in calls] == [
        ["q", "v"],
        ["down"],
    ] * 2
    assert [call.args[6] for call in calls] == [0, 2] * 2


def test_packing_and_joining_see_the_same_linears() -> None:
    graph = graph_with(Adapters(2), PackLinears(WeightPacks()), JoinLinears())
    counts = graph.op_counts()
    assert counts["speccompile.packed_linears.default"] == 4 and counts["speccompile.native_lora.default"] == 8
    assert "aten.linear.default" not in counts
