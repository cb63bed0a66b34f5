"""The rotary tables that one op computes are those of the separate ops."""

from __future__ import annotations

import pytest
import torch

import speccompile
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes
from speccompile.passes.target.fuse_rotary_tables import FuseRotaryTables
from support.families import SIZES, model_of
from support.graph_runs import outcome
from support.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("native")

aten = torch.ops.aten
#: Tolerance of logits of about 10, and of keys and values.
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.15}


def stages(model: torch.nn.Module) -> tuple[StepGraph, StepGraph, str]:
    with speccompile.wrap(model, "none", tiers=(0,), **{**SIZES, "backend": "eager"}) as spec:
        before, after = (spec.stages[name] for name in ("fuse_linears", "fuse_rotary_tables"))
        return before.graph, after.graph, after.note


@pytest.mark.parametrize(
    ("family", "dtype", "pairs"),
    [
        ("llama", torch.float32, 1),
        ("llama", torch.bfloat16, 1),
        ("qwen3", torch.float32, 1),
        ("phi3", torch.float32, 1),
        ("gemma3_text", torch.float32, 2),
    ],
    ids=str,
)
def test_tables_of_families(family: str, dtype: torch.dtype, pairs: int) -> None:
    before, after, note = stages(model_of(family, dtype=dtype))
    assert note == f"{pairs} pairs of tables"
    ops = after.op_counts()
    assert not {"aten.cos.default", "aten.sin.default"} & set(ops)
    for rows, width in ((1, 1), (2, 5)):
        wanted, found = outcome(before, rows, width), outcome(after, rows, width)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_sines_before_cosines() -> None:
    graph = stages(tiny_llama())[0].copy()
    (cosines,) = graph.graph.find_nodes(op="call_function", target=aten.cos.default)
    (sines,) = graph.graph.find_nodes(op="call_function", target=aten.sin.default)
    wanted, angles = outcome(graph.copy(), 1, 3), cosines.args[0]
    for node in (sines, cosines):
        node.args = (angles.args[0][0],)
        node.args = (angles,)
    assert list(angles.users) == [sines, cosines]
    assert FuseRotaryTables().run(graph).matched == 1
    for name, value in outcome(graph, 1, 3).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt_oss", "cohere"])
def test_tables_of_another_form_stay(family: str) -> None:
    _, after, note = stages(model_of(family))
    assert note == "0 pairs of tables" and after.op_counts()["aten.cos.default"] == 1


@pytest.mark.parametrize("changed", ["another reader", "other scaling", "different halves"])
def test_tables_that_only_resemble_the_pattern_stay(changed: str) -> None:
    graph = stages(tiny_llama())[0].copy()
    (cosines,) = graph.graph.find_nodes(op="call_function", target=aten.cos.default)
    angles = cosines.args[0]
    if changed == "another reader":
        with graph.graph.inserting_after(angles):
            graph.graph.call_function(aten.tan.default, (angles,))
    elif changed == "other scaling":
        (product,) = cosines.users
        product.args = (cosines, 2.0)
    else:
        first = angles.args[0][0]
        with graph.graph.inserting_before(angles):
            other = graph.graph.call_function(aten.neg.default, (first,))
        angles.args = ([first, other], -1)
    assert FuseRotaryTables().run(graph) == Changes(0, "0 pairs of tables")
