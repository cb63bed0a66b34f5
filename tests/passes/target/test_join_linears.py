"""Which linears run as one op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import speccompile
from speccompile.speculator.speculator import Speculator
from support.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("native")


def wrapped(model: Any, **options: Any) -> Speculator:
    return speccompile.wrap(model, "none", tiers=(0,), max_batch=1, max_len=64, backend="eager", **options)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("weights", ["same", "int8"])
def test_queries_keys_and_values_are_one_op_and_so_are_gate_and_up(biases: bool, weights: str) -> None:
    model = tiny_llama(attention_bias=biases)
    with wrapped(model, weights=weights) as spec:
        op = "speccompile.packed_linear" if weights == "same" else "speccompile.int8_linear"
        before = spec.stages["choose_linear"].graph.op_counts()
        counts = spec.stages["join_linears"].graph.op_counts()
        layers = model.config.num_hidden_layers
        # 7 in a layer, and the lm_head; o and down stay alone.
        assert before[f"{op}.default"] == 7 * layers + 1
        assert counts[f"{op}s.default"] == 2 * layers and counts[f"{op}.default"] == 2 * layers + 1
        names = spec.stages["join_linears"].graph.ports
        assert {"model_layers_0_self_attn_q_proj_weight", "model_layers_0_mlp_up_proj_weight"}.isdisjoint(names)


def test_linears_with_and_without_bias_are_not_mixed() -> None:
    model = tiny_llama()
    layer = model.model.layers[0].self_attn
    layer.k_proj.bias = torch.nn.Parameter(torch.randn(layer.k_proj.out_features))
    ids = torch.randint(1, 128, (1, 20), generator=torch.Generator().manual_seed(0))
    with wrapped(model) as spec:
        counts = spec.stages["join_linears"].graph.op_counts()
        assert counts["speccompile.packed_linears.default"] == 4 and counts["speccompile.packed_linear.default"] == 6
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, pad_token_id=0)
        assert torch.equal(spec.generate(ids, max_new_tokens=20), wanted)


def test_every_result_is_that_of_its_own_weight() -> None:
    """Also where all weights of a group have the same shape, so that an exchange would not show in sizes."""
    model = tiny_llama(num_key_value_heads=4, num_attention_heads=4)
    ids = torch.randint(1, 128, (1, 20), generator=torch.Generator().manual_seed(1))
    with wrapped(model) as spec:
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, pad_token_id=0)
        assert torch.equal(spec.generate(ids, max_new_tokens=20), wanted)
