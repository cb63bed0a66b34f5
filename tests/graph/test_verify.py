"""The verifier: every problem it can find, made on purpose in a graph that is fine without it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import fx

from speccompile.errors import VerifierError
from speccompile.graph.body import Body, BodyResult
from speccompile.graph.port import Port
from speccompile.graph.state import N, StateSpec, resolve_layout
from speccompile.graph.step_graph import Anchors, StepGraph, Values
from speccompile.graph.verify import verify, written
from support.errors import raises

aten = torch.ops.aten
CPU = torch.device("cpu")


def good_graph() -> StepGraph:
    """``seen[rows] = x; logits = x @ w``."""
    specs = [StateSpec("seen", (N, 3), torch.float32)]
    layout = resolve_layout(specs, max_batch=4, max_len=8, max_draft_len=1, max_width=2, vocab_size=3)
    graph = fx.Graph()
    x, w, rows, seen = (graph.placeholder(name) for name in ("x", "w", "rows", "seen"))
    graph.call_function(aten.index_put_.default, (seen, [rows], x))
    logits = graph.create_node("call_function", aten.mm.default, (x, w), name="logits")
    graph.output((logits,))
    ports = {
        "x": Port("x", "input", (2, 3), torch.float32, CPU),
        "w": Port("w", "weight", (3, 3), torch.float32, CPU, value=torch.ones(3, 3)),
        "rows": Port("rows", "input", (2,), torch.int64, CPU, high=5, distinct=True),
        "seen": Port("seen", "state", (5, 3), torch.float32, CPU),
    }
    anchors = Anchors(x, rows, logits, [logits], logits, logits)
    step = StepGraph(graph, ports, anchors, layout, CPU, sizes={"B": 2}, values=Values(logits=logits))
    step.propagate()
    return step


def node(step: StepGraph, name: str) -> fx.Node:
    return next(item for item in step.graph.nodes if item.name == name)


def call(step: StepGraph, target: object, *args: object, **kwargs: object) -> fx.Node:
    """A call at the end of the graph, without the shape that ``insert`` would give it."""
    with step.graph.inserting_before(step.output):
        return step.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]


def write(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def first_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[1:3]


def test_a_good_graph_passes_and_gets_its_shapes() -> None:
    step = good_graph()
    step.insert(write, node(step, "seen"))
    for item in step.graph.nodes:
        item.meta.pop("val", None)
    verify(step, "a pass")
    assert step.values["logits"].meta["val"].shape == (2, 3)


# --- form and ports ------------------------------------------------------------------------------


def placeholder_without_port(step: StepGraph) -> None:
    del step.ports["x"]


def port_without_placeholder(step: StepGraph) -> None:
    step.ports["ghost"] = step.ports["x"]


def attribute(step: StepGraph) -> None:
    with step.graph.inserting_before(step.output):
        step.graph.create_node("get_attr", "hidden_table")


def unknown_body(step: StepGraph) -> None:
    with step.graph.inserting_before(step.output):
        step.graph.create_node("call_module", "decoder_layer", (step.values["logits"],))


def no_torch_op(step: StepGraph) -> None:
    call(step, torch.exp, step.values["logits"]).meta["val"] = step.values["logits"].meta["val"]


def used_before_defined(step: StepGraph) -> None:
    exp = step.insert(torch.exp, step.values["logits"])
    step.values["logits"].prepend(exp)


def name_twice(step: StepGraph) -> None:
    step.values["logits"].name = "x"


def value_gone(step: StepGraph) -> None:
    exp = step.insert(torch.exp, step.values["logits"])
    step.name_value("probabilities", exp)
    step.graph.erase_node(exp)


# --- writes --------------------------------------------------------------------------------------


def write_to_a_weight(step: StepGraph) -> None:
    step.insert(write, node(step, "w"))


def write_to_a_view_of_a_weight(step: StepGraph) -> None:
    step.insert(write, step.insert(first_rows, node(step, "w")))


def write_to_an_out_argument(step: StepGraph) -> None:
    call(step, aten.relu.out, step.values["logits"], out=node(step, "x"))


def stale_view(step: StepGraph) -> None:
    view = step.insert(first_rows, node(step, "seen"))
    step.insert(write, node(step, "seen"))
    step.insert(torch.exp, view)


def stale_view_of_a_view(step: StepGraph) -> None:
    view = step.insert(torch.t, step.insert(first_rows, node(step, "seen")))
    step.insert(write, node(step, "seen"))
    step.insert(torch.exp, view)


def stale_view_behind_a_write_through_another(step: StepGraph) -> None:
    view = step.insert(first_rows, node(step, "seen"))
    step.insert(write, step.insert(first_rows, node(step, "seen")))
    step.insert(torch.exp, view)


def stale_output(step: StepGraph) -> None:
    view = step.insert(first_rows, node(step, "seen"))
    step.insert(write, node(step, "seen"))
    step.set_outputs(view)


# --- shapes --------------------------------------------------------------------------------------


def other_dtype(step: StepGraph) -> None:
    step.ports["rows"] = Port("rows", "input", (2,), torch.int32, CPU)


def op_with_another_dtype(step: StepGraph) -> None:
    compared = step.insert(lambda x: x + 1, step.values["logits"])
    compared.target = aten.gt.Scalar


def other_rank(step: StepGraph) -> None:
    moved = step.insert(lambda x: x.unsqueeze(0), step.values["logits"])
    moved.target, moved.args = aten.sum.default, moved.args[:1]


def shapes_that_do_not_fit(step: StepGraph) -> None:
    step.ports["w"] = Port("w", "weight", (4, 3), torch.float32, CPU)


BROKEN: list[tuple[Callable[[StepGraph], None], str]] = [
    (placeholder_without_port, "placeholders without a port: x"),
    (port_without_placeholder, "ports without a placeholder: ghost"),
    (attribute, "reads the attribute 'hidden_table'"),
    (unknown_body, "'decoder_layer', which is not an outlined body"),
    (no_torch_op, "which is not a torch op"),
    (used_before_defined, "not well formed.*before it has been defined"),
    (name_twice, "not well formed.*redefined"),
    (value_gone, "named values whose node is gone: probabilities"),
    (write_to_a_weight, "writes the weight 'w'"),
    (write_to_a_view_of_a_weight, "writes the weight 'w'"),
    (write_to_an_out_argument, "writes the input 'x'"),
    (stale_view, "'exp' reads 'slice_1', a view of state 'seen' from before"),
    (stale_view_of_a_view, "'exp' reads 't', a view of state 'seen' from before"),
    (stale_view_behind_a_write_through_another, "a view of state 'seen' from before"),
    (stale_output, "'output' reads .* a view of state 'seen' from before"),
    (other_dtype, r"'rows' was torch.int64\[2\], now torch.int32\[2\]"),
    (op_with_another_dtype, r"was torch.float32\[2, 3\], now torch.bool\[2, 3\]"),
    (other_rank, r"was torch.float32\[1, 2, 3\], now torch.float32\[\]"),
    (shapes_that_do_not_fit, "its shapes cannot be computed"),
]


@pytest.mark.parametrize(("damage", "problem"), BROKEN, ids=[damage.__name__ for damage, _ in BROKEN])
def test_damage_is_found_and_blamed_on_the_pass(damage: Callable[[StepGraph], None], problem: str) -> None:
    step = good_graph()
    damage(step)
    with raises(VerifierError, name="the culprit", problem=re.compile(problem, re.DOTALL)):
        verify(step, "the culprit")


# --- what is fine --------------------------------------------------------------------------------


def copy_read_after_a_write(step: StepGraph) -> None:
    before = step.insert(lambda seen: seen[1:3].clone(), node(step, "seen"))
    step.insert(write, node(step, "seen"))
    step.insert(torch.exp, before)


def view_taken_after_the_write(step: StepGraph) -> None:
    step.insert(write, node(step, "seen"))
    step.insert(torch.exp, step.insert(first_rows, node(step, "seen")))


def write_to_a_temporary(step: StepGraph) -> None:
    step.insert(write, step.insert(torch.exp, step.values["logits"]))


def other_rows(step: StepGraph) -> None:
    step.ports["x"] = Port("x", "input", (4, 3), torch.float32, CPU)
    step.ports["rows"] = Port("rows", "input", (4,), torch.int64, CPU)


@pytest.mark.parametrize(
    "change", [copy_read_after_a_write, view_taken_after_the_write, write_to_a_temporary, other_rows]
)
def test_what_is_fine_is_let_through(change: Callable[[StepGraph], None]) -> None:
    step = good_graph()
    change(step)
    verify(step, "a pass")


def body_graph(mutates: frozenset[int]) -> tuple[StepGraph, fx.Node]:
    """The good graph with a call of a body that gets ``(logits, w)``."""
    inner = fx.Graph()
    hidden, other = inner.placeholder("hidden"), inner.placeholder("other")
    inner.output(inner.call_function(aten.add.Tensor, (hidden, other)))
    body = Body(
        name="decoder_layer",
        module=fx.GraphModule(torch.nn.Module(), inner),
        dims=(("B", 3), (3, 3)),
        dtypes=(torch.float32, torch.float32),
        results=(BodyResult(("B", 3), torch.float32),),
        captured={"B": 2},
        mutates=mutates,
        layers=(0,),
        key="",
    )
    step = good_graph()
    # Rows as many as w has, so that they add.
    step.ports["x"] = Port("x", "input", (3, 3), torch.float32, CPU)
    step.ports["rows"] = Port("rows", "input", (3,), torch.int64, CPU)
    step.bodies["decoder_layer"] = body
    with step.graph.inserting_before(step.output):
        made = step.graph.create_node("call_module", "decoder_layer", (step.values["logits"], node(step, "w")))
    return step, made


def test_a_body_writes_what_it_says() -> None:
    step, made = body_graph(frozenset())
    assert list(written(step, made)) == []
    verify(step, "outline")
    assert made.meta["val"].shape == (3, 3)

    step, made = body_graph(frozenset({1}))
    assert list(written(step, made)) == [node(step, "w")]
    with raises(VerifierError, name="outline", problem=re.compile("'decoder_layer' writes the weight 'w'")):
        verify(step, "outline")


def test_written_reads_schemas() -> None:
    step = good_graph()
    index_put = step.graph.find_nodes(op="call_function", target=aten.index_put_.default)[0]
    assert list(written(step, index_put)) == [node(step, "seen")]
    assert list(written(step, step.values["logits"])) == []
    copied = call(step, aten._foreach_add_.Scalar, [node(step, "seen"), step.values["logits"]], 1)
    assert list(written(step, copied)) == [node(step, "seen"), step.values["logits"]]
