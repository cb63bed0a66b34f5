"""Models that run on the threads of the C++ ops."""

from __future__ import annotations

import torch

from speccompile.graph.step_graph import StepGraph

aten = torch.ops.aten
ops = torch.ops.speccompile

#: Slow ops that torch distributes over OpenMP's threads: products, and attention, which consists of them.
PRODUCTS = frozenset(
    {
        aten.addmm.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.convolution.default,
        aten.einsum.default,
        aten.linear.default,
        aten.matmul.default,
        aten.mm.default,
        aten.scaled_dot_product_attention.default,
        ops.attention.default,
        ops.attention_fixed_order.default,
        ops.expert_linear.default,
    }
)


def runs_on_ours(graph: StepGraph) -> bool:
    """Whether the layers of an outlined model leave no product to torch.

    Products outside of the bodies are small tables, such as rotary ones, and the lm_head.
    """
    return not any(node.target in PRODUCTS for body in graph.bodies.values() for node in body.module.graph.nodes)
