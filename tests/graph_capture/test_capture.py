"""Capture: a flat graph of named tensors that computes what the model computes, and a model left as it was."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx
from transformers import LlamaForCausalLM

from speccompile.errors import UnsupportedModel
from speccompile.graph.step_graph import StepGraph
from support.errors import raises
from support.families import family
from support.tiny import Captured, captured, tiny_llama

SLOTS, PLACES = 3, 68  # of max_batch=2, max_len=64 and a widest step of 4


@dataclass
class Runnable(Captured):
    """A captured model that can be run op by op."""

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Value of every node, by name."""
        inputs = {"input_ids": tokens, "position_ids": positions, "row_slots": slots}
        arguments = []
        for node in self.graph.placeholders:
            port = self.graph.ports[node.name]
            arguments.append(port.value if port.role == "weight" else inputs.get(node.name, self.arena.get(node.name)))
        recorder = Recorder(fx.GraphModule(torch.nn.Module(), self.graph.graph))
        with torch.no_grad():
            recorder.run(*arguments)
        return recorder.seen


def calls(graph: StepGraph) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "call_function"]


class Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.seen[n.name] = super().run_node(n)
        return self.seen[n.name]


def runnable(model: LlamaForCausalLM) -> Runnable:
    return Runnable(**vars(captured(model)))


@pytest.fixture(scope="module")
def tiny() -> Runnable:
    return runnable(tiny_llama())


# --- form ----------------------------------------------------------------------------------------


def test_the_graph_is_flat_and_every_placeholder_has_a_port(tiny: Runnable) -> None:
    graph = tiny.graph
    assert {node.op for node in graph.graph.nodes} == {"placeholder", "call_function", "output"}
    assert [node.name for node in graph.placeholders if node.name not in graph.ports] == []
    assert set(graph.ports) == {node.name for node in graph.placeholders}
    for node in graph.placeholders:
        port = graph.ports[node.name]
        assert port.name == node.name and tuple(node.meta["val"].shape) == port.shape
    inputs = {name for name, port in graph.ports.items() if port.role == "input"}
    assert inputs == {"input_ids", "position_ids", "row_slots"}
    assert graph.facts == {"captured", "logits"}


@pytest.mark.parametrize("tie", [False, True])
def test_weights_are_the_models_own_storage(tie: bool, tiny: Runnable) -> None:
    step = captured(tiny_llama(tie=True)) if tie else tiny
    tensors = dict(step.model.named_parameters(remove_duplicate=False)) | dict(step.model.named_buffers())
    weights = [port for port in step.graph.ports.values() if port.role == "weight"]
    for port in weights:
        assert port.path is not None and port.value is not None
        assert port.value.data_ptr() == tensors[port.path].data_ptr()
        assert port.shape == tuple(tensors[port.path].shape) and not port.value.requires_grad
    # Every parameter is there once, tied or not, and the one table that the rotary embedding reads.
    expected = [*step.model.parameters(), step.model.model.rotary_emb.inv_freq]
    assert sorted(p.value.data_ptr() for p in weights if p.value is not None) == sorted(t.data_ptr() for t in expected)
    head = step.graph.anchors.lm_head.args[1]
    embedding = step.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)[0].args[0]
    assert (head is embedding) == tie


def test_kv_shapes_are_observed() -> None:
    # A head dim that no other size gives away: hidden / heads is 16.
    model = tiny_llama(layers=3, heads=4, kv_heads=2, head_dim=24, dtype=torch.bfloat16)
    layout = captured(model).arena.layout
    for layer in range(3):
        for name in (f"k_{layer}", f"v_{layer}"):
            assert layout.tensors[name].shape == (SLOTS, PLACES, 2, 24)
            assert layout.tensors[name].dtype is torch.bfloat16
    assert not [name for name in layout.tensors if name.endswith("_3")]


def test_keys_and_values_are_written_in_place_and_nothing_else_is(tiny: Runnable) -> None:
    graph = tiny.graph
    writes = {}
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.index_put_.default):
        target, (slots, positions), _ = node.args
        writes[target.name] = node.meta["layer"]
        assert target.op == "placeholder" and graph.ports[target.name].role == "state"
        assert positions is graph.anchors.positions and slots.args[0].name == "row_slots"
    assert writes == {"k_0": 0, "v_0": 0, "k_1": 1, "v_1": 1}
    assert len([node for node in calls(graph) if node.target._schema.is_mutable]) == 4


def test_a_run_writes_only_its_slots_and_positions(tiny: Runnable) -> None:
    for name in ("k_0", "v_0", "k_1", "v_1"):
        tiny.arena[name].fill_(7.0)
    positions = torch.tensor([[5, 6], [20, 21]])
    tiny.run(torch.tensor([[1, 2], [3, 4]]), positions, torch.tensor([2, 0]))
    expected = torch.zeros(SLOTS, PLACES, dtype=torch.bool)
    expected[2, 5:7] = expected[0, 20:22] = True
    for name in ("k_0", "v_0", "k_1", "v_1"):
        assert torch.equal((tiny.arena[name] != 7.0).any(-1).any(-1), expected), name


def test_one_attention_op_a_layer(tiny: Runnable) -> None:
    order = calls(tiny.graph)
    attention = [node for node in order if "attention" in str(node.target)]
    assert [node.target for node in attention] == [torch.ops.speccompile.attention.default] * 2
    for layer, node in enumerate(attention):
        _, keys, values, slots, positions, scale, *_ = (*node.args,)
        assert node.meta["layer"] == layer
        assert (keys.name, values.name) == (f"k_{layer}", f"v_{layer}")
        # It reads the arena, after what this layer wrote there.
        writes = [order.index(user) for cache in (keys, values) for user in cache.users if user is not node]
        assert len(writes) == 2 and max(writes) < order.index(node)
        assert slots.name == "row_slots" and positions is tiny.graph.anchors.positions
        assert scale == 16**-0.5


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gemma2", [(8, None, True, False), (None, None, True, False)]),
        ("llama4_text", [(None, 8, False, False), (None, None, False, False)]),
        ("gpt_oss", [(8, None, False, True), (None, None, False, True)]),
    ],
)
def test_each_layer_attends_as_the_model_says(name: str, arguments: list[tuple[Any, ...]]) -> None:
    """Window, chunk, whether there is a soft cap, whether there are sinks."""
    graph = captured(family(name)).graph
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.speccompile.attention.default)
    found = []
    for node in nodes:
        window, chunk, softcap, sinks = (*node.args[6:], None, None, None, None)[:4]
        found.append((window, chunk, softcap is not None, sinks is not None))
    assert found == arguments


@pytest.mark.parametrize("name", ["bloom", "deepseek_v3"])
def test_a_model_with_attention_of_its_own_keeps_it(name: str) -> None:
    """Over each row's own cache, written in place, at positions of its own."""
    step = Runnable(**vars(captured(family(name))))
    assert step.observed.route == "eager"
    ours = {str(node.target) for node in calls(step.graph) if "speccompile" in str(node.target)}
    assert ours <= {"speccompile.expert_linear.default"}
    written = {node.args[0].name for node in calls(step.graph) if node.target is torch.ops.aten.index_put_.default}
    assert written == {"k_0", "v_0", "k_1", "v_1"}
    texts = torch.randint(100, (2, 12), generator=torch.Generator().manual_seed(3))
    slots = torch.tensor([2, 0])
    step.run(texts[:1, :2], torch.arange(2)[None], slots[:1])
    got = []
    for first in range(0, 10, 5):
        positions = torch.stack([torch.arange(first + 2, first + 7), torch.arange(first, first + 5)])
        got.append(step.run(texts.gather(1, positions), positions, slots)["logits"])
    with torch.no_grad():
        expected = step.model(input_ids=texts, use_cache=False).logits
    torch.testing.assert_close(torch.cat(got, dim=1)[0], expected[0, 2:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(got, dim=1)[1], expected[1, :10], atol=1e-4, rtol=1e-4)


def test_sizes_from_data_are_refused_by_name() -> None:
    reason = re.compile(r"roberta\.encoder\.layer\.0\.output \(XmodOutput\) computes sizes from data")
    with raises(UnsupportedModel, reason=reason):
        captured(family("xmod"))


# --- anchors -------------------------------------------------------------------------------------


def test_anchors_are_the_models_own_hidden_states(tiny: Runnable) -> None:
    graph, anchors = tiny.graph, tiny.graph.anchors
    assert (anchors.tokens.name, anchors.positions.name) == ("input_ids", "position_ids")
    assert graph.values["logits"] is anchors.lm_head and graph.output.args == ((anchors.lm_head,),)
    # Whatever is put before start is before all that depends on the inputs.
    order = calls(graph)
    for reader in (*anchors.tokens.users, *anchors.positions.users):
        if isinstance(reader.meta["val"], torch.Tensor):
            assert order.index(anchors.start) <= order.index(reader)

    tokens = torch.randint(128, (1, 9), generator=torch.Generator().manual_seed(0))
    seen = tiny.run(tokens, torch.arange(9)[None], torch.tensor([1]))
    with torch.no_grad():
        expected = tiny.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    # Of the last layer transformers keeps the normed state alone.
    torch.testing.assert_close(seen[anchors.layers[0].name], expected.hidden_states[1])
    torch.testing.assert_close(seen[anchors.final_norm.name], expected.hidden_states[2])
    torch.testing.assert_close(seen[anchors.lm_head.name], expected.logits)
    with torch.no_grad():
        normed = tiny.model.model.norm(seen[anchors.layers[1].name])
    torch.testing.assert_close(normed, expected.hidden_states[2])


def test_nodes_know_their_layer(tiny: Runnable) -> None:
    for node in calls(tiny.graph):
        weights = {item.name for item in node.all_input_nodes if item.name.startswith("model_layers_")}
        for name in weights:
            assert node.meta["layer"] == int(name.split("_")[2])
    for node in (tiny.graph.anchors.start, tiny.graph.anchors.final_norm, tiny.graph.anchors.lm_head):
        assert "layer" not in node.meta


# --- symbolic sizes ------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 7), (2, 1), (2, 5), (3, 13), (1, 40)])
def test_rows_and_width_are_symbolic(tiny: Runnable, rows: int, width: int) -> None:
    tokens = torch.randint(128, (rows, width), generator=torch.Generator().manual_seed(width))
    positions = torch.arange(width).repeat(rows, 1)
    logits = tiny.run(tokens, positions, torch.arange(rows))["logits"]
    with torch.no_grad():
        torch.testing.assert_close(logits, tiny.model(input_ids=tokens, use_cache=False).logits)


def test_rows_stand_at_positions_of_their_own(tiny: Runnable) -> None:
    """Two texts, one of them two tokens ahead: fed piece by piece, next to each other, in slots out of order."""
    texts = torch.randint(128, (2, 12), generator=torch.Generator().manual_seed(3))
    slots = torch.tensor([2, 0])
    tiny.run(texts[:1, :2], torch.arange(2)[None], slots[:1])
    pieces = []
    for first in range(0, 10, 5):
        positions = torch.stack([torch.arange(first + 2, first + 7), torch.arange(first, first + 5)])
        pieces.append(tiny.run(texts.gather(1, positions), positions, slots)["logits"])
    with torch.no_grad():
        expected = tiny.model(input_ids=texts, use_cache=False).logits
    got = torch.cat(pieces, dim=1)
    torch.testing.assert_close(got[0], expected[0, 2:])
    torch.testing.assert_close(got[1], expected[1, :10])


def test_example_sizes_keep_clear_of_every_other_size() -> None:
    # 11 and 13 are what a model without these sizes gets.
    step = captured(tiny_llama(vocab=13, hidden=44, heads=2, kv_heads=1, max_positions=17, intermediate_size=11))
    rows, width = step.graph.sizes["B"], step.graph.sizes["T"]
    fixed = {size for port in step.graph.ports.values() if port.role != "input" for size in port.shape}
    assert 13 in fixed and 11 in fixed
    assert not {rows, width} & fixed and rows != width
    constants = {value for node in step.graph.graph.nodes for value in _integers(node.args)}
    assert not {rows, width} & constants


def _integers(value: Any) -> list[int]:
    if isinstance(value, (list, tuple)):
        return [item for inner in value for item in _integers(inner)]
    return [value] if isinstance(value, int) else []


# --- the user's model ----------------------------------------------------------------------------


def test_the_attention_setting_is_back_when_export_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    before = model.config._attn_implementation
    during = []

    def export(*args: object, **options: object) -> None:
        during.append(model.config._attn_implementation)
        raise RuntimeError("export fell over")

    monkeypatch.setattr(torch.export, "export", export)
    with raises(UnsupportedModel, reason=re.compile("it cannot be exported: RuntimeError: export fell over")):
        captured(model)
    assert during == ["speccompile"] and model.config._attn_implementation == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_two_captures_of_one_model_share_its_weights(tiny: Runnable) -> None:
    first = tiny
    second = captured(first.model)
    assert [node.name for node in first.graph.graph.nodes] == [node.name for node in second.graph.graph.nodes]
    for name, port in first.graph.ports.items():
        other = second.graph.ports[name].value
        assert (port.value is None) == (other is None)
        if port.value is not None and other is not None:
            assert port.value.data_ptr() == other.data_ptr()
