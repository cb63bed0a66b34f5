"""StepGraph: editing a flat graph keeps its ports, names, anchors and values in step."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from speccompile.graph import propagation
from speccompile.graph.port import Port
from speccompile.graph.state import N, StateSpec, resolve_layout
from speccompile.graph.step_graph import Anchors, StepGraph

aten = torch.ops.aten
CPU = torch.device("cpu")
F32, I64 = torch.float32, torch.int64


def small_graph() -> StepGraph:
    """``logits = relu(x @ w + bias)``, with a state tensor ``seen [N, 3]`` that gets x's rows, and one unused."""
    specs = [StateSpec("seen", (N, 3), F32), StateSpec("count", (N,), I64)]
    layout = resolve_layout(specs, max_batch=4, max_len=8, max_draft_len=1, max_width=2, vocab_size=3)
    graph = fx.Graph()
    x, w, bias, seen, rows = (graph.placeholder(name) for name in ("x", "w", "bias", "seen", "rows"))
    graph.call_function(aten.index_put_.default, (seen, [rows], x))
    product = graph.create_node("call_function", aten.mm.default, (x, w), name="mm")
    shifted = graph.create_node("call_function", aten.add.Tensor, (product, bias), name="add")
    relu = graph.call_function(aten.relu.default, (shifted,))
    graph.output((relu,))
    weights = {"w": torch.arange(9.0).reshape(3, 3), "bias": torch.ones(3)}
    ports = {name: Port(name, "weight", tuple(t.shape), F32, CPU, value=t) for name, t in weights.items()}
    ports |= {
        "x": Port("x", "input", (2, 3), F32, CPU),
        "seen": Port("seen", "state", (5, 3), F32, CPU),
        "rows": Port("rows", "input", (2,), I64, CPU, high=5, distinct=True),
    }
    step = StepGraph(
        graph=graph,
        ports=ports,
        anchors=Anchors(x, rows, product, [shifted], shifted, relu),
        layout=layout,
        device=CPU,
        sizes={"B": 2},
        facts={"captured"},
    )
    step.name_value("logits", relu)
    step.propagate()
    return step


def node(step: StepGraph, name: str) -> fx.Node:
    return next(item for item in step.graph.nodes if item.name == name)


def execute(step: StepGraph, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Run the graph; weights come from the ports, all else from ``inputs``, written in place."""
    values = [inputs.get(item.name, step.ports[item.name].value) for item in step.placeholders]
    result: tuple[torch.Tensor, ...] = fx.Interpreter(fx.GraphModule(torch.nn.Module(), step.graph)).run(*values)
    return result


def some_inputs() -> dict[str, torch.Tensor]:
    x = torch.tensor([[1.0, 2.0, 0.5], [0.0, 1.0, -2.0]])
    return {"x": x, "seen": torch.zeros(5, 3), "rows": torch.tensor([3, 1])}


def test_copy_keeps_names_anchors_and_values() -> None:
    step = small_graph()
    step.graph.find_nodes(op="call_function", target=aten.mm.default)[0].meta["layer"] = 7
    copied = step.copy()
    assert [item.name for item in copied.graph.nodes] == [item.name for item in step.graph.nodes]
    assert copied.values["logits"] is node(copied, "logits")
    assert copied.anchors.tokens is node(copied, "x")
    assert copied.anchors.start is node(copied, "mm")
    assert copied.anchors.layers == [node(copied, "add")]
    assert copied.anchors.lm_head is node(copied, "logits")
    assert node(copied, "mm").meta["layer"] == 7
    assert node(copied, "mm").meta["val"].shape == (2, 3)
    assert copied.ports == step.ports and copied.ports["w"].value is step.ports["w"].value
    assert copied.facts == step.facts and copied.sizes == step.sizes


def test_an_edit_of_a_copy_leaves_the_original_alone() -> None:
    step = small_graph()
    before = [(item.name, item.args) for item in step.graph.nodes]
    copied = step.copy()
    copied.insert(torch.exp, copied.values["logits"])
    copied.state("count")
    copied.bind_input("rows", copied.insert(torch.zeros_like, copied.state("count"), before=copied.anchors.start))
    copied.name_value("other", copied.values["logits"])
    copied.facts.add("edited")
    assert [(item.name, item.args) for item in step.graph.nodes] == before
    assert set(step.values) == {"logits"} and step.facts == {"captured"}
    assert "count" not in step.ports and "rows" in step.ports


def test_insert_inlines_plain_torch() -> None:
    step = small_graph()

    def normalised(logits: torch.Tensor, *, power: int) -> tuple[torch.Tensor, None, dict[str, torch.Tensor]]:
        scaled = logits**power
        return scaled / (scaled.sum(-1, keepdim=True) + 1), None, {"largest": scaled.amax(-1)}

    share, nothing, named = step.insert(normalised, step.values["logits"], power=2)
    assert nothing is None
    assert all(item.op in ("placeholder", "call_function", "output") for item in step.graph.nodes)
    assert share.meta["val"].shape == (2, 3) and named["largest"].meta["val"].shape == (2,)
    step.set_outputs(step.values["logits"], share, named["largest"])
    step.graph.lint()
    logits, got_share, largest = execute(step, **some_inputs())
    expected = normalised(logits, power=2)
    assert logits.any()
    torch.testing.assert_close(got_share, expected[0])
    torch.testing.assert_close(largest, expected[2]["largest"])


def test_insert_writes_state_in_place() -> None:
    step = small_graph()

    def count_rows(count: torch.Tensor, rows: torch.Tensor) -> None:
        count.index_put_((rows,), count[rows] + 1)

    assert step.insert(count_rows, step.state("count"), node(step, "rows")) is None
    count = torch.tensor([10, 10, 10, 10, 10])
    execute(step, **some_inputs(), count=count)
    assert count.tolist() == [10, 11, 10, 11, 10]


def test_insert_goes_where_it_is_told() -> None:
    step = small_graph()
    doubled = step.insert(lambda x: x * 2, node(step, "x"), before=step.anchors.start)
    order = list(step.graph.nodes)
    assert order.index(doubled) < order.index(step.anchors.start)
    last = step.insert(lambda x: x * 2, step.values["logits"])
    assert list(step.graph.nodes)[-2] is last


def test_insert_traces_a_function_once_for_alike_tensors_and_constants() -> None:
    step, calls = small_graph(), []

    def power(x: torch.Tensor, *, by: int) -> torch.Tensor:
        calls.append(by)
        return x**by

    x, logits = node(step, "x"), step.values["logits"]
    made = [step.insert(power, x, by=2), step.insert(power, logits, by=2), step.copy().insert(power, x, by=2)]
    assert calls == [2]
    made += [step.insert(power, logits, by=3), step.insert(power, node(step, "w"), by=2)]
    assert calls == [2, 3, 2] and len({id(item) for item in made}) == 5
    # A list could be another one by the next time.
    for _ in range(2):
        step.insert(lambda x, by: calls.append(by) or x, x, by=[4])
    assert calls[3:] == [[4], [4]]
    step.set_outputs(logits, *made[:2])
    logits, *squares = execute(step, **some_inputs())
    torch.testing.assert_close(squares, [some_inputs()["x"] ** 2, logits**2])


def test_insert_tells_copies_of_one_trace_apart() -> None:
    step = small_graph()
    x, logits = node(step, "x"), step.values["logits"]
    first, second = (step.insert(torch.neg, item) for item in (x, logits))
    difference = step.insert(torch.sub, first, second)
    # And one tensor twice is not two tensors.
    nothing = step.insert(torch.sub, first, first)
    step.set_outputs(logits, difference, nothing)
    logits, difference, nothing = execute(step, **some_inputs())
    torch.testing.assert_close(difference, logits - some_inputs()["x"])
    assert difference.any() and not nothing.any()


def test_insert_refuses_tensor_constants() -> None:
    step = small_graph()

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0, 3.0])

    with pytest.raises(ValueError, match="shifted creates a tensor from Python numbers"):
        step.insert(shifted, node(step, "x"))


def test_state_is_added_once_with_the_port_of_its_spec() -> None:
    step = small_graph()
    count = step.state("count")
    assert step.state("count") is count
    assert step.ports["count"].role == "state" and step.ports["count"].shape == (5,)
    assert count.meta["val"].dtype is I64
    assert step.placeholders[-1] is count
    step.graph.lint()


def test_weights_keep_the_capital_letters_of_their_modules() -> None:
    """As MPT's ``Wqkv`` has them."""
    step, value = small_graph(), torch.ones(2, 3)
    packed = step.weight(Port("Wqkv_packed", "weight", (2, 3), value.dtype, value.device, value=value))
    assert packed.name == "Wqkv_packed" and step.ports["Wqkv_packed"].value is value
    assert step.weight(step.ports["Wqkv_packed"]) is packed


def test_splice_copies_a_part_on_other_inputs() -> None:
    step = small_graph()
    other = step.insert(lambda x: x.flip(0)[:1] + 1, node(step, "x"), before=step.anchors.start)
    nodes_before = set(step.graph.nodes)
    copied = step.splice(step.anchors.layers[0], {step.anchors.tokens: other}, before=step.anchors.start)
    # mm and add, and nothing else: neither relu after it nor the write it does not need.
    made = [item for item in step.graph.nodes if item not in nodes_before]
    assert [item.target for item in made] == [aten.mm.default, aten.add.Tensor]
    # Shapes follow the spliced input, and the weights are the same placeholders.
    assert copied.meta["val"].shape == (1, 3)
    assert step.ports["w"].value is not None and node(step, "w") in made[0].all_input_nodes
    step.set_outputs(step.values["logits"], copied)
    step.graph.lint()
    inputs = some_inputs()
    logits, got = execute(step, **inputs)
    w, bias = step.ports["w"].value, step.ports["bias"].value
    torch.testing.assert_close(got, (inputs["x"].flip(0)[:1] + 1) @ w + bias)
    torch.testing.assert_close(logits, (inputs["x"] @ w + bias).relu())


def test_splice_stops_at_what_it_replaces() -> None:
    step = small_graph()
    end = step.output
    hidden = step.insert(lambda x: x * 0 - 1, step.anchors.layers[0])
    copied = step.splice(step.anchors.lm_head, {step.anchors.layers[0]: hidden}, before=end)
    step.set_outputs(copied)
    (got,) = execute(step, **some_inputs())
    assert copied.all_input_nodes == [hidden] and got.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_bind_input_replaces_a_port_by_a_value() -> None:
    step = small_graph()
    rows = step.insert(lambda x: torch.arange(x.shape[0]) + 2, node(step, "x"), before=step.placeholders[-1].next)
    step.name_value("rows_here", rows)
    step.bind_input("rows", rows)
    assert "rows" not in step.ports and "rows" not in [item.name for item in step.placeholders]
    assert step.anchors.positions is rows
    step.graph.lint()
    inputs = some_inputs()
    del inputs["rows"]
    execute(step, **inputs)
    torch.testing.assert_close(inputs["seen"][2:4], inputs["x"])
    assert not inputs["seen"][[0, 1, 4]].any()


def test_name_value_renames_the_node() -> None:
    step = small_graph()
    step.name_value("hidden", step.anchors.layers[0])
    assert step.values["hidden"] is node(step, "hidden") is step.anchors.layers[0]


def test_dead_code_and_its_ports_go_and_writes_stay() -> None:
    step = small_graph()
    step.set_outputs(step.anchors.start)  # x @ w: neither bias nor relu
    del step.values["logits"]
    step.remove_dead_code()
    left = [item.target for item in step.graph.nodes if item.op == "call_function"]
    assert left == [aten.index_put_.default, aten.mm.default]
    assert set(step.ports) == {"x", "w", "seen", "rows"} == {item.name for item in step.placeholders}


def test_op_counts_are_sorted_by_frequency() -> None:
    step = small_graph()
    step.insert(lambda x: (x + 1) + 2, step.values["logits"])
    counts = step.op_counts()
    assert counts == {"aten.add.Tensor": 3, "aten.index_put_.default": 1, "aten.mm.default": 1, "aten.relu.default": 1}
    assert next(iter(counts)) == "aten.add.Tensor"


def test_propagate_follows_the_ports() -> None:
    step = small_graph()
    step.ports["x"] = Port("x", "input", (6, 3), torch.float64, CPU)
    for name in ("w", "bias", "seen"):
        port = step.ports[name]
        step.ports[name] = Port(name, port.role, port.shape, torch.float64, CPU, value=port.value)
    step.ports["rows"] = Port("rows", "input", (6,), I64, CPU)
    step.propagate()
    assert step.values["logits"].meta["val"].shape == (6, 3)
    assert step.values["logits"].meta["val"].dtype is torch.float64


def test_propagate_computes_what_a_change_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    step = small_graph()
    computed: list[str] = []
    call = propagation.fake_call
    monkeypatch.setattr(propagation, "fake_call", lambda item, bodies: computed.append(item.name) or call(item, bodies))
    node(step, "mm").args = (node(step, "w"), node(step, "w"))
    step.propagate()
    assert computed == ["mm", "add", "logits"] and step.values["logits"].meta["val"].shape == (3, 3)
    computed.clear()
    node(step, "mm").target = aten.add.Tensor  # of the same kind, so that nothing after it changes
    step.propagate()
    assert computed == ["mm"]
    # The stride counts too: what follows may be a view.
    node(step, "mm").target, node(step, "mm").args = aten.t.default, (node(step, "w"),)
    step.propagate()
    assert computed == ["mm", "mm", "add", "logits"]


def test_start_moves_on_when_what_it_named_is_dead() -> None:
    """Passes put what feeds the inputs before ``start``, which has to be a node of the graph."""
    step = small_graph()
    unused = step.insert(torch.exp, node(step, "x"), before=step.anchors.start)
    step.anchors.start = unused
    step.remove_dead_code()
    assert unused not in set(step.graph.nodes)
    assert step.anchors.start is node(step, "mm")
    step.remove_dead_code()
    assert step.anchors.start is node(step, "mm")
