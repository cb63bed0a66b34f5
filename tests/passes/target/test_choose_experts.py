"""Linears of experts in a wrap: by the C++ ops, over the model's own weights and over rounded ones."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch

import speccompile
from speccompile.errors import InvalidOption
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.packed_forward import inputs_unrounded
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.passes.target.choose_experts import ChooseExperts
from speccompile.speculator.speculator import Speculator
from speccompile.utils.weight_forms import WeightForms
from support.errors import raises
from support.families import assert_texts, model_of, periodic
from support.tiny import known_capture

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


def test_a_mapping_keeps_the_values_of_experts() -> None:
    model = model_of("mixtral")
    with wrapped(model, weights={"*": "int8", "experts": "same"}) as spec:
        graph = spec.stages["choose_linear"].graph
        ports = [graph.ports[node.args[2].name] for node in experts_in(graph)]
        own = {parameter.data_ptr() for parameter in model.parameters()}
        assert ports and {port.dtype for port in ports} == {torch.float32}
        assert all(port.value is not None and port.value.data_ptr() in own for port in ports)
        assert "neither packed nor rounded" in spec.explain()
        assert spec.check([periodic(seed=2)[:20]], max_new_tokens=8)


# Transposed, with biases; one matrix of all experts, read by views; a loop of its own; and usual ones.
@pytest.mark.parametrize("free", [False, True], ids=["", "free_originals"])
@pytest.mark.parametrize("name", ["gpt_oss", "dbrx", "jetmoe", "mixtral"])
def test_rounded_experts_are_those_of_the_rounded_model(name: str, free: bool) -> None:
    model, dequantised = model_of(name), model_of(name)
    with wrapped(model, weights="int4", free_originals=free, policy="fixed:3") as spec:
        assert not experts_in(spec.stages["choose_experts"].graph)
        assert "int4 in groups of 32 by speccompile.int4_expert_linear" in spec.explain()
        assert spec.check([periodic(seed=2)[:20], periodic(seed=3)[:9]], max_new_tokens=8)
        ids = torch.tensor([periodic(seed=2)[:20]])
        packs = spec._build.packs
        found = 0
        for path, pack in packs.items():
            if pack.form.rounds:
                parameter = dequantised.get_parameter(path)
                parameter.data = pack.unpacked_original(parameter.dtype, parameter.shape)
                found += 1
        assert found >= 4
        # transformers' own experts, over what the packs hold.
        with torch.no_grad(), inputs_unrounded(model, packs):
            torch.testing.assert_close(model(ids).logits, dequantised(ids).logits, rtol=1e-3, atol=1e-3)
        # The weights of a model that is saved are those.
        if free:
            for path, value in dequantised.state_dict().items():
                torch.testing.assert_close(model.state_dict()[path], value)


def test_a_weight_of_which_a_part_is_read_keeps_its_values() -> None:
    with wrapped(model_of("longcat_flash"), weights="int4") as spec:
        explained = spec.explain()
        assert "neither packed nor rounded" in explained and "int4_expert_linear" in explained
        assert spec.check([periodic(seed=2)[:20]], max_new_tokens=8)


def test_changed_weights_are_rounded_again() -> None:
    model = model_of("mixtral")
    with wrapped(model, weights="int4") as spec:
        with torch.no_grad():
            for path, pack in spec._build.packs.items():
                if pack.experts is not None:
                    model.get_parameter(path).mul_(-1)
        assert spec.check([periodic(seed=2)[:20]], max_new_tokens=8)


def test_experts_of_a_draft_model_are_rounded_with_its_linears() -> None:
    options = {"tiers": (0, 3), "max_batch": 2, "max_len": 64, "backend": "eager", "policy": "fixed:3"}
    model, draft = model_of("llama"), model_of("mixtral")
    with speccompile.wrap(model, "draft_target", draft=draft, draft_weights="int4", **options) as spec:
        assert spec._build.drafter is not None
        assert any(pack.experts is not None for pack in spec._build.drafter.packs)
        assert_texts(spec, model, [periodic(seed=2)[:38]])


@pytest.mark.parametrize("form", ["same", "int8"])
def test_without_c_plus_plus_ops_a_name_may_only_keep_values(form: str) -> None:
    graph = known_capture(model_of("mixtral")).graph
    packs = WeightPacks(WeightForms(modules=(("experts", form),)))  # type: ignore[arg-type]
    choose = ChooseExperts(native=False, packs=packs)
    with contextlib.nullcontext() if form == "same" else raises(InvalidOption, reason=re.compile("on a CPU")):
        choose.run(graph)
    assert not packs.unused_names()


def test_a_name_of_no_weight_is_refused() -> None:
    with raises(InvalidOption, name="weights", reason=re.compile("no packed linear is in a module 'expert'")):
        wrapped(model_of("mixtral"), weights={"*": "same", "expert": "int8"})
