"""Printed stages: Python files of their own that compute exactly what their stage computes."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import speccompile
from speccompile.errors import LoweringError
from speccompile.graph.port import Port
from speccompile.graph.printing import load_python, to_python
from speccompile.graph.stage import Stage
from speccompile.graph.state import resolve_layout
from speccompile.graph.step_graph import Anchors, StepGraph
from speccompile.speculator.speculator import Speculator
from support.errors import raises
from support.tiny import tiny_llama

MODES = ("ngram", "early_exit")


@functools.cache
def wrapped(mode: str) -> Speculator:
    return speccompile.wrap(tiny_llama(), mode, tiers=(0, 2), max_batch=2, max_len=32, backend="eager")


@pytest.fixture(params=MODES)
def spec(request: pytest.FixtureRequest) -> Speculator:
    return wrapped(request.param)


@pytest.fixture
def early_exit() -> Speculator:
    return wrapped("early_exit")


def all_stages(spec: Speculator) -> list[Stage]:
    """Every stage of every tier and prefill width, each once."""
    tiers = [*spec.engine.tiers.values(), *spec.engine.prefill_tiers.values()]
    return list({id(stage): stage for tier in tiers for stage in tier.stages.values()}.values())


def interpreted(graph: StepGraph, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The graph's own nodes, run one by one: nothing of the printer is used."""
    root = nn.Module()
    for name, body in graph.bodies.items():
        root.add_module(name, body.module)
    with torch.no_grad():
        result: tuple[torch.Tensor, ...] = fx.Interpreter(fx.GraphModule(root, graph.graph)).run(*inputs)
    return result


def outcome(step: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What ``step`` returns, and all inputs as it leaves them."""
    own = [tensor.clone() for tensor in inputs]
    with torch.no_grad():
        outputs = step(*own)
    return [*outputs, *own]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_every_stage_reproduces_its_graph(spec: Speculator) -> None:
    stages = all_stages(spec)
    names = {(stage.tier, stage.name) for stage in stages}
    assert len(names) == len(stages)
    assert len({tier for tier, _ in names}) == 1 + len(spec.engine.tiers) + len(spec.engine.prefill_tiers)
    for stage in stages:
        inputs = stage.make_inputs(0)
        printed = outcome(stage.call, inputs)
        assert same(printed, outcome(lambda *x, g=stage.graph: interpreted(g, list(x)), inputs)), stage
        assert all(tensor.isfinite().all() for tensor in printed), stage
        # Equal is not an accident: every stage returns something or leaves a trace in its inputs.
        changed = [not torch.equal(a, b) for a, b in zip(inputs, printed[-len(inputs) :], strict=True)]
        assert any(changed), stage


def test_every_file_imports_only_torch_and_our_ops(spec: Speculator) -> None:
    for stage in all_stages(spec):
        tree = ast.parse(stage.python)
        imported = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
        assert imported == {"torch", "speccompile.lowering.stage_ops"}, stage
        assert "__import__" not in stage.python and "importlib" not in stage.python
        # Nothing but functions and the guarded main: what step computes depends on its inputs alone.
        kinds = [type(node) for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
        assert set(kinds) == {ast.Expr, ast.FunctionDef, ast.If}


def test_signatures_list_the_ports(spec: Speculator) -> None:
    for stage in all_stages(spec):
        step = next(node for node in ast.parse(stage.python).body if getattr(node, "name", "") == "step")
        assert isinstance(step, ast.FunctionDef)
        assert [argument.arg for argument in step.args.args] == [node.name for node in stage.graph.placeholders]


def test_example_inputs_fit_the_ports(spec: Speculator) -> None:
    for stage in all_stages(spec):
        ports = [stage.graph.ports[node.name] for node in stage.graph.placeholders]
        for port, value in zip(ports, stage.make_inputs(3), strict=True):
            assert tuple(value.shape) == port.shape and value.dtype is port.dtype, (stage, port)
            if port.high is not None:
                assert port.low <= int(value.min()) and int(value.max()) < port.high, (stage, port)
        again = stage.make_inputs(3)
        assert all(torch.equal(a, b) for a, b in zip(again, stage.make_inputs(3), strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(again, stage.make_inputs(4), strict=True))


def test_a_file_runs_by_itself(early_exit: Speculator, tmp_path: Path) -> None:
    stage = early_exit.stages["draft_early_exit"]
    path = tmp_path / "stage.py"
    path.write_text(stage.python)
    # Elsewhere, and without this process's state.
    run = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, check=True)
    (logits,) = stage.call(*stage.make_inputs())
    printed, *written = run.stdout.splitlines()
    kind, name, *shape, dtype, total = printed.split()
    assert (kind, name, dtype) == ("output", "logits", "torch.float32")
    assert {line.split()[1] for line in written} == {"k_0", "v_0", "k_1", "v_1"}
    assert "".join(shape).replace(",", ", ") == str(tuple(logits.shape))
    assert float(total) == pytest.approx(float(logits.double().sum()), rel=1e-4)


EDITS = [
    ("capture", "1e-06", "0.5"),
    ("choose_attention", "row_slots, position_ids, 0.25", "row_slots, position_ids, 0.5"),
    ("outline", "position_ids, 0.25", "position_ids, 0.5"),
    ("draft_early_exit", "1e-06", "0.5"),
    ("verify_inputs", "ge.Scalar(constant_pad_nd, 128)", "ge.Scalar(constant_pad_nd, 1)"),
    ("commit", "emitted, accepted, proposed,", "emitted, proposed, accepted,"),
]


@pytest.mark.parametrize(("name", "old", "new"), EDITS)
def test_one_edit_of_the_text_changes_the_result(early_exit: Speculator, name: str, old: str, new: str) -> None:
    stage = early_exit.stages[name]
    assert old in stage.python
    edited = load_python(stage.python.replace(old, new, 1), "<edited>")["step"]
    assert any(
        not same(outcome(stage.call, inputs), outcome(edited, inputs))
        for inputs in (stage.make_inputs(seed) for seed in range(16))
    )


def test_shapes_and_passes_are_in_the_text(early_exit: Speculator) -> None:
    text = early_exit.stages["commit"].python
    assert "# float32[2, 3, 128]" in text  # the verify logits [B, K+1, V]
    order = [text.index(f"    # {name}\n") for name in ("draft_early_exit", "verify_inputs", "greedy_accept", "commit")]
    assert order == sorted(order)


# --- single nodes --------------------------------------------------------------------------------


def graph_of(target: Any, *args: Any, **kwargs: Any) -> StepGraph:
    """One call on an input ``x [2, 3]``, which is its first argument."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    result = graph.call_function(target, (x, *args), kwargs)
    graph.output((result,))
    layout = resolve_layout([], max_batch=1, max_len=4, max_draft_len=0, max_width=1, vocab_size=3)
    ports = {"x": Port("x", "input", (2, 3), torch.float32, torch.device("cpu"))}
    return StepGraph(graph, ports, Anchors(x, x, x, [], x, x), layout, torch.device("cpu"), {})


aten = torch.ops.aten

LITERALS = [
    (aten.clamp.default, (float("-inf"), 0.1), {}),
    (aten.add.Tensor, (1,), {"alpha": 1e-7}),
    (aten.mul.Tensor, (1 / 3,), {}),
    (aten.nan_to_num.default, (float("nan"), float("inf")), {}),
    (aten.to.dtype, (torch.float64,), {}),
    (aten.ones_like.default, (), {"dtype": torch.int64, "device": torch.device("cpu"), "memory_format": None}),
    (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
    (aten.view.default, ([3, 2],), {}),
    (aten.sum.dim_IntList, ([0, 1], True), {}),
    (aten.slice.Tensor, (1, 0, 2**63 - 1), {}),
    (aten.argmax.default, (None,), {}),
]


@pytest.mark.parametrize(("target", "args", "kwargs"), LITERALS, ids=[str(target) for target, *_ in LITERALS])
def test_literals_survive_printing(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    step = load_python(to_python(graph_of(target, *args, **kwargs)), "<literal>")["step"]
    x = torch.tensor([[0.5, -2.0, 3.0], [float("nan"), 1.0, 0.0]])
    (got,), expected = step(x), target(x, *args, **kwargs)
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_the_title_is_the_files_docstring() -> None:
    text = to_python(graph_of(aten.exp.default), "A title.")
    assert ast.get_docstring(ast.parse(text)) == "A title."


def test_what_is_no_torch_op_cannot_be_printed() -> None:
    with raises(LoweringError, node="exp", target=repr(torch.exp)):
        to_python(graph_of(torch.exp))
