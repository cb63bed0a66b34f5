"""Which steps run in the C++ ops' own pool of threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

import speccompile.lowering.ops.native  # noqa: F401  defines the ops
from speccompile.lowering.pooled import runs_on_ours

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
