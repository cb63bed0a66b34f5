"""Which steps run in the C++ ops' own pool of threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

import speccompile
import speccompile.ops.native  # defines the ops
from speccompile.lowering.pooled import runs_on_ours
from support.tiny import tiny_llama

aten = torch.ops.aten
ops = torch.ops.speccompile


def outlined(*targets: Any) -> Any:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for target in targets:
        x = graph.call_function(target, (x, x))
    graph.output(x)
    return SimpleNamespace(bodies={"decoder_layer": SimpleNamespace(module=fx.GraphModule({}, graph))})


def test_layers_of_our_products_run_in_the_pool() -> None:
    assert runs_on_ours(outlined(ops.packed_linears.default, ops.native_attention.default, aten.mul.Tensor))


@pytest.mark.parametrize("product", [aten.bmm.default, aten.linear.default, ops.attention.default], ids=str)
def test_a_product_of_torchs_keeps_openmps_threads(product: Any) -> None:
    assert not runs_on_ours(outlined(ops.packed_linear.default, product, aten.mul.Tensor))


def test_all_draft_lengths_of_a_number_of_rows_run_on_the_same_threads() -> None:
    sizes: dict[str, Any] = {"tiers": (0, 1, 3), "max_batch": 2, "max_len": 36, "backend": "eager"}
    with speccompile.wrap(tiny_llama(), "ngram", **sizes) as spec:
        for tier in spec.engine.tiers.values():
            assert tier.pool_tokens == 4 * tier.key.rows
        for chunk in spec.engine.prefill_tiers.values():
            assert chunk.pool_tokens == chunk.key.tokens
