"""Which linears become one product on CUDA, and what it does to the model: nothing but the place of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import speccompile
from speccompile.errors import ModelChanged, WeightsReplaced
from speccompile.passes.target.join_weights import _name
from speccompile.speculator.speculator import Speculator
from support.as_on_cuda import as_on_cuda
from support.families import SIZES, assert_texts, model_of, periodic
from support.tiny import tiny_llama

LINEAR = "aten.linear.default"
PROMPTS = [periodic(1)[:38], periodic(2)[:9]]


@pytest.fixture(autouse=True)
def backend() -> Iterator[str]:
    with as_on_cuda() as name:
        yield name


def wrapped(model: Any, mode: str = "none", **options: Any) -> Speculator:
    return speccompile.wrap(model, mode, **{**SIZES, "backend": "as_on_cuda", **options})


def linears(spec: Speculator) -> int:
    return spec.stages["join_weights"].graph.op_counts()[LINEAR]


def addresses(model: torch.nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("family", "in_a_layer"),
    # Of Cohere's parallel layers all but two linears read one input; Phi-3 has them fused, and Qwen2 has biases.
    [("qwen2", 4), ("cohere2", 3), ("phi3", 4), ("mixtral", 3)],
)
def test_families_decode_as_before_with_fewer_products(family: str, in_a_layer: int) -> None:
    model = model_of(family)
    with wrapped(model, "ngram", tiers=(0, 3)) as spec:
        assert linears(spec) == in_a_layer * model.config.num_hidden_layers + 1
        assert_texts(spec, model, PROMPTS)


def test_names_of_joined_weights() -> None:
    names = [f"model_layers_0_self_attn_{name}_proj_weight" for name in "qkv"]
    assert _name(names) == "model_layers_0_self_attn_q_k_v_proj_weight"
    assert _name(["gate_proj_weight", "gate_up_proj_weight"]) == "gate_up_proj_weight"


def test_weights_are_one_copy_and_are_followed_in_place() -> None:
    model = tiny_llama()
    total = sum(parameter.nbytes for parameter in model.parameters())
    with wrapped(model) as spec:
        memory = spec.report().memory
        assert sum(item.nbytes for item in memory.items if item.path[0] == "model") >= total
        assert not [item for item in memory.items if item.path[0] == "packed copies"]
        assert "in 4 products" in spec.explain()
        assert_texts(spec, model, PROMPTS)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(-1.5)
            model.model.layers[1].mlp.up_proj.weight.data.mul_(0.5)
        assert_texts(spec, model, PROMPTS)


def test_a_weight_that_is_replaced_is_found() -> None:
    model = tiny_llama()
    with wrapped(model) as spec:
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.data = weight.data.clone()
        with pytest.raises(WeightsReplaced, match=r"layers\.1\.mlp\.up_proj\.weight"):
            spec.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2)


def test_a_second_wrap_moves_nothing() -> None:
    model = tiny_llama()
    with wrapped(model) as first:
        before = addresses(model)
        with wrapped(model, "ngram", tiers=(0, 3)) as second:
            assert addresses(model) == before and linears(second) == linears(first)
            assert_texts(second, model, PROMPTS)
        assert_texts(first, model, PROMPTS)


def test_weights_stay_where_another_open_speculator_reads_them() -> None:
    model = tiny_llama()
    with wrapped(model, backend="eager") as first:
        before = addresses(model)
        with wrapped(model) as second:
            assert addresses(model) == before
            assert "10 apart: another speculator reads them" in second.explain()
            assert_texts(second, model, PROMPTS)
        assert_texts(first, model, PROMPTS)
        first.close()
        with wrapped(model) as third:
            assert addresses(model) != before and "apart" not in third.explain()


def test_a_draft_model_that_is_the_target_follows() -> None:
    model = tiny_llama()
    with wrapped(model, "draft_target", draft=model, tiers=(0, 3), policy="fixed:3") as spec:
        assert_texts(spec, model, PROMPTS)
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(-1.0)
        assert_texts(spec, model, PROMPTS)
        assert spec.stats.acceptance_length > 2


def test_modules_and_hooks_are_still_watched() -> None:
    model = tiny_llama()
    with wrapped(model) as spec:
        model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
        with pytest.raises(ModelChanged):
            spec.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2)
