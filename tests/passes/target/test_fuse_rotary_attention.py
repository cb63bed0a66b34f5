"""Which layers rotate in the attention op, and that their results are those of the separate ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import speccompile
from speccompile import Tree
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.target.fuse_rotary_attention import FuseRotaryAttention
from speccompile.speculator.speculator import Speculator
from support.families import SIZES, assert_texts, model_of, periodic
from support.graph_runs import outcome
from support.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("native")

PROMPTS = [periodic(1)[:38], periodic(2)[:9]]
#: Tolerance of logits of about 10, and of keys and values.
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.15}
FUSED = torch.ops.speccompile.native_rotary_attention.default


def wrapped(model: Any, mode: str = "none", tiers: Any = (0,), **options: Any) -> Speculator:
    return speccompile.wrap(model, mode, tiers=tiers, **{**SIZES, "backend": "eager", **options})


def calls(graph: StepGraph) -> int:
    return graph.op_counts().get("speccompile.native_rotary_attention.default", 0)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        # Norms of queries and keys, and a table for each kind of layer; queries, keys and values of one linear.
        *((name, torch.float32) for name in ("gemma3_text", "phi3")),
        # Of GPT-NeoX a part of each head rotates.
        *((name, torch.bfloat16) for name in ("llama", "gpt_neox")),
    ],
    ids=str,
)
def test_families_that_rotate_halves_are_fused(family: str, dtype: torch.dtype) -> None:
    with wrapped(model_of(family, dtype=dtype)) as spec:
        before, after = (spec.stages[name].graph for name in ("choose_attention", "fuse_rotary_attention"))
        assert calls(after) == 2 and spec.stages["fuse_rotary_attention"].note == "2 of 2 calls of attention"
    ops = after.op_counts()
    assert not {"aten.neg.default", "aten.index_put_.default", "speccompile.native_attention.default"} & set(ops)
    for rows, width in ((1, 1), (2, 5)):
        wanted, found = outcome(before, rows, width), outcome(after, rows, width)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("family", ["glm4", "gpt_oss", "llama4_text"])
def test_other_forms_stay_as_they_are(family: str) -> None:
    """Interleaved pairs, half tables, complex numbers."""
    with wrapped(model_of(family)) as spec:
        stage = spec.stages["fuse_rotary_attention"]
        assert calls(stage.graph) == 0 and stage.note == "0 of 2 calls of attention"


@pytest.mark.parametrize(("family", "fused", "all_calls"), [("smollm3", 1, 2), ("gemma3n_text", 2, 4)])
def test_layers_without_positions_or_own_keys_stay_as_they_are(family: str, fused: int, all_calls: int) -> None:
    model = model_of(family)
    with wrapped(model, "ngram", (0, 3)) as spec:
        assert spec.stages["fuse_rotary_attention"].note == f"{fused} of {all_calls} calls of attention"
        assert_texts(spec, model, PROMPTS)


@pytest.mark.parametrize(
    ("mode", "tiers"),
    [("ngram", (0, 3)), ("draft_target", (0, 3)), ("draft_target", (0, Tree.static([[0], [1], [0, 0]])))],
    ids=str,
)
def test_texts_are_those_of_the_model(mode: str, tiers: Any) -> None:
    model = tiny_llama()
    options: dict[str, Any] = {"draft": model} if mode == "draft_target" else {}
    with wrapped(model, mode, tiers, **options) as spec:
        spec.set_tier(tiers[1])
        assert calls(spec.stages["fuse_rotary_attention"].graph) == 2
        assert_texts(spec, model, PROMPTS)


@pytest.mark.parametrize("changed", ["write", "sine", "half"])
def test_what_only_resembles_the_pattern_is_left(changed: str) -> None:
    aten = torch.ops.aten
    with wrapped(tiny_llama()) as spec:
        graph = spec.stages["choose_attention"].graph.copy()
    nodes = list(graph.graph.nodes)
    if changed == "write":
        # Another reader of the keys between their write and attention.
        write = next(node for node in nodes if node.target is aten.index_put_.default)
        with graph.graph.inserting_after(write):
            graph.graph.call_function(aten.sum.default, (write.args[0],))
    elif changed == "sine":
        # Keys rotated by other sines than queries.
        turned = [node for node in nodes if node.target is aten.mul.Tensor and node.args[0].target is aten.cat.default]
        product, sines = turned[1], turned[1].args[1]
        with graph.graph.inserting_before(product):
            other = graph.graph.call_function(aten.unsqueeze.default, (turned[0].args[1].args[0], 1))
            other = graph.graph.call_function(aten.neg.default, (other,))
        other.meta["val"] = sines.meta["val"]
        product.args = (product.args[0], other)
    else:
        # The first half is the one that changes its sign.
        join = next(node for node in nodes if node.target is aten.cat.default and "layer" in node.meta)
        join.args = (join.args[0][::-1], -1)
    assert FuseRotaryAttention().run(graph).matched == 1
    assert len(graph.graph.find_nodes(op="call_function", target=FUSED)) == 1
