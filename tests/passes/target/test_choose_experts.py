"""Linears of experts in a wrap: by the C++ op, over the model's own weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import speccompile
from speccompile.errors import InvalidOption
from speccompile.graph.step_graph import StepGraph
from speccompile.speculator.speculator import Speculator
from support.errors import raises
from support.families import assert_texts, model_of, periodic

NATIVE = torch.ops.speccompile.native_expert_linear.default


pytestmark = pytest.mark.usefixtures("native")


def wrapped(model: Any, **options: Any) -> Speculator:
    return speccompile.wrap(model, "ngram", tiers=(0, 3), max_batch=2, max_len=64, backend="eager", **options)


def experts_in(graph: StepGraph) -> list[Any]:
    return graph.graph.find_nodes(op="call_function", target=NATIVE)


# Weights that lie the other way round, with biases and a gate of its own; a loop of its own; and usual ones.
@pytest.mark.parametrize(("name", "linears"), [("gpt_oss", 2), ("dbrx", 3), ("mixtral", 2)])
def test_the_text_is_that_of_transformers_and_no_bit_depends_on_the_width(name: str, linears: int) -> None:
    model = model_of(name)
    with wrapped(model, deterministic=True, policy="fixed:3") as spec:
        found = experts_in(spec.stages["choose_experts"].graph)
        assert found and len(found) % linears == 0
        assert_texts(spec, model, [periodic(seed=2)[:38], periodic(seed=3)[:17]])
        assert spec.stats.accepted_tokens > 0
        assert f"{len(found)} linears call speccompile.native_expert_linear" in spec.explain()


def test_weights_of_experts_are_the_models_own_whatever_the_form_of_others() -> None:
    model = model_of("mixtral")
    with wrapped(model, weights="int8") as spec:
        graph = spec.stages["choose_linear"].graph
        ports = [graph.ports[node.args[2].name] for node in experts_in(graph)]
        own = {parameter.data_ptr() for parameter in model.parameters()}
        assert ports and {port.dtype for port in ports} == {torch.float32}
        assert all(port.value is not None and port.value.data_ptr() in own for port in ports)
        assert "neither packed nor rounded" in spec.explain()
        assert spec.check([periodic(seed=2)[:20]], max_new_tokens=8)


def test_a_form_of_their_own_is_refused() -> None:
    with raises(InvalidOption, name="weights", reason=re.compile("no packed linear is in a module 'experts'")):
        wrapped(model_of("mixtral"), weights={"*": "same", "experts": "int8"})
