"""What a wrap has room for: bad options, and models whose linears have no room."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from speccompile import Adapters, wrap
from speccompile.adapters.buffers import AdapterBuffers
from speccompile.errors import CaptureMismatch, InvalidOption
from speccompile.graph_capture.model_info import inspect_model
from support.errors import raises
from support.lora import lora_config, own_text, with_adapters
from support.tiny import tiny_llama


def wrapped(model: Any, adapters: Any, **options: Any) -> Any:
    return wrap(model, "none", tiers=(0,), max_len=32, backend="eager", adapters=adapters, **options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"count": 0}, "count"),
        ({"count": True}, "count"),
        ({"count": 1, "max_rank": 0}, "max_rank"),
        ({"count": 1, "modules": ()}, "modules"),
        ({"count": 1, "modules": ["q_proj", 3]}, "modules"),
        ({"count": 1, "dtype": "int8"}, "dtype"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], name: str) -> None:
    with raises(InvalidOption, where="Adapters", name=name):
        Adapters(**options)


def test_what_is_no_adapters_is_refused() -> None:
    with raises(InvalidOption, where="wrap", name="adapters", value=4):
        wrapped(tiny_llama(), 4)


def test_a_name_that_no_linear_has_is_refused() -> None:
    with raises(
        InvalidOption, where="wrap", name="adapters", reason=re.compile("called 'query'. Give some of down_proj")
    ):
        wrapped(tiny_llama(), Adapters(1, modules=("q_proj", "query")))
    # The lm_head is in no decoder layer.
    with raises(InvalidOption, where="wrap", name="adapters", reason=re.compile("called 'lm_head'")):
        wrapped(tiny_llama(), Adapters(1, modules="lm_head"))


def test_a_model_with_adapters_in_its_layers_is_refused() -> None:
    """Which to give instead is said: the base model."""
    model = with_adapters({"one": lora_config()}, tiny_llama(layers=1))
    with raises(InvalidOption, where="wrap", name="adapters", reason=re.compile("peft_model.unload")):
        wrapped(model, Adapters(1))
    with wrapped(model.unload(), Adapters(1)) as spec:
        assert spec.adapters == ()


def test_saved_hidden_states_are_of_the_model_alone(tmp_path: Any) -> None:
    with raises(InvalidOption, where="wrap", name="adapters", reason=re.compile("hidden states are saved")):
        wrapped(tiny_llama(layers=6), Adapters(1), save_hidden_states=tmp_path)


def test_linears_that_are_none_in_the_step_are_named() -> None:
    """A router's product is one over the tokens; what a module computes otherwise is refused by its path."""

    class Twice(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + super().forward(2 * input)

    model = tiny_llama()
    old = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = Twice(old.in_features, old.out_features, bias=False)
    path = "model.layers.1.mlp.up_proj"
    with raises(InvalidOption, where="wrap", name="adapters", value=path, reason=re.compile(path)):
        wrapped(model, Adapters(1))
    with wrapped(model, Adapters(1, modules="q_proj")) as spec:
        assert spec.stages["add_adapters"].note.startswith("2 linears")


def test_experts_have_no_room_and_the_rest_has() -> None:
    config = MixtralConfig(
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        num_local_experts=2,
    )
    model = MixtralForCausalLM(config).eval()
    buffers = AdapterBuffers.of(model, inspect_model(model), Adapters(1))
    assert [linear.path.rpartition(".")[2] for linear in buffers.linears] == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_buffers_have_the_ranks_and_the_dtype_that_were_asked_for() -> None:
    model = tiny_llama()
    buffers = AdapterBuffers.of(
        model, inspect_model(model), Adapters(3, max_rank=20, modules="v_proj", dtype="bfloat16")
    )
    specs = {spec.name: spec for spec in buffers.state()}
    assert specs["lora_1_self_attn_v_proj_a"].shape == (3, 64, 32)
    assert specs["lora_1_self_attn_v_proj_b"].shape == (3, 1, 32, 32)
    assert specs["lora_1_self_attn_v_proj_b"].dtype == torch.bfloat16


def test_a_wrap_is_compared_with_the_models_own_forward_with_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange of two linears of one shape is seen."""
    pairs_at = AdapterBuffers.pairs_at

    def exchanged(self: AdapterBuffers, arena: Any, place: int) -> dict[str, Any]:
        found = pairs_at(self, arena, place)
        keys, values = (f"model.layers.0.self_attn.{name}_proj" for name in "kv")
        return found | {keys: found[values], values: found[keys]}

    monkeypatch.setattr(AdapterBuffers, "pairs_at", exchanged)
    with pytest.raises(CaptureMismatch):
        wrapped(tiny_llama(layers=1), Adapters(1))


def test_tiers_of_one_shape_have_adapters_too() -> None:
    model = with_adapters({"one": lora_config()})
    options: dict[str, Any] = {"tiers": (0, 3), "max_batch": 2, "max_len": 64, "backend": "eager"}
    with wrap(tiny_llama(), "ngram", deterministic=True, adapters=Adapters(1), **options) as spec:
        spec.add_adapter("one", model)
        for draft_len in (0, 3):
            spec.set_tier(draft_len)
            request = spec.engine.submit([3, 1, 4, 1, 5], max_new_tokens=12, adapter="one")
            assert request.result().token_ids == own_text(model, "one", [3, 1, 4, 1, 5], 12)
