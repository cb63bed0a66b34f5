"""Both attention ops on a GPU equal their reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speccompile.ops import attention as attention_op
from support.gpu import TOLERANCE, on_gpu

pytestmark = pytest.mark.gpu

ops = torch.ops.speccompile


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [1, 8, 128])
@pytest.mark.parametrize("options", [{}, {"window": 100, "softcap": 20.0}], ids=["plain", "window"])
def test_attention(dtype: torch.dtype, width: int, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(width)
    rows, heads, groups, dim, capacity = 3, 8, 2, 64, 700
    q = torch.randn(rows, width, heads, dim, generator=generator).to(dtype)
    caches = [torch.randn(5, capacity, groups, dim, generator=generator).to(dtype) for _ in range(2)]
    slots = torch.tensor([4, 0, 2])
    positions = torch.tensor([[3], [400], [capacity - width]]) + torch.arange(width)
    wanted = attention_op.reference(q, *caches, slots, positions, dim**-0.5, **options)
    inputs = on_gpu(q, *caches, slots, positions)
    for op in (ops.attention, ops.attention_fixed_order):
        got = op(*inputs, dim**-0.5, **options).cpu()
        torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [80, 96, 128, 256])
@pytest.mark.parametrize(
    "options",
    [{"chunk": 100}, {"alibi": True}, {"sinks": True}, {"tree": True}],
    ids=["chunk", "alibi", "sinks", "tree"],
)
def test_attention_of_other_models(dtype: torch.dtype, dim: int, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(dim)
    rows, width, heads, groups, capacity = 3, 8, 8, 2, 700
    q = torch.randn(rows, width, heads, dim, generator=generator).to(dtype)
    caches = [torch.randn(5, capacity, groups, dim, generator=generator).to(dtype) for _ in range(2)]
    slots, roots = torch.tensor([4, 0, 2]), torch.tensor([[3], [400], [capacity - width]])
    tensors: dict[str, torch.Tensor] = {}
    nodes = torch.arange(width)
    if "sinks" in options:
        tensors["sinks"] = torch.randn(heads, generator=generator).to(dtype)
    if "tree" in options:
        # A binary heap, and the depths of its nodes.
        tensors["parents"] = ((nodes + 1) // 2 - 1).expand(rows, width).contiguous()
        nodes = (nodes + 1).log2().floor().long()
    values = {name: value for name, value in options.items() if name in ("chunk", "alibi")}
    wanted = attention_op.reference(q, *caches, slots, roots + nodes, dim**-0.5, **values, **tensors)
    inputs = on_gpu(q, *caches, slots, roots + nodes)
    there = dict(zip(tensors, on_gpu(*tensors.values()), strict=True))
    # A tree's places have no fixed order.
    for op in (ops.attention,) if "parents" in tensors else (ops.attention, ops.attention_fixed_order):
        got = op(*inputs, dim**-0.5, **values, **there).cpu()
        torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_in_fixed_order_a_row_has_the_same_bits_in_any_company() -> None:
    generator = torch.Generator().manual_seed(0)
    caches = [torch.randn(4, 600, 2, 64, generator=generator, dtype=torch.bfloat16) for _ in range(2)]
    q = torch.randn(3, 8, 8, 64, generator=generator, dtype=torch.bfloat16)
    positions = torch.tensor([[100], [333], [592]]) + torch.arange(8)
    slots = torch.tensor([1, 3, 0])
    q, keys, values, slots, positions = on_gpu(q, *caches, slots, positions)
    together = ops.attention_fixed_order(q, keys, values, slots, positions, 0.125)
    for row in range(3):
        for place in range(8):
            at = (slice(row, row + 1), slice(place, place + 1))
            alone = ops.attention_fixed_order(q[at], keys, values, slots[at[0]], positions[at], 0.125)
            assert torch.equal(alone[0, 0], together[row, place])
