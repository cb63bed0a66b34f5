"""Attention over the KV arena on CUDA: split over the cache, the query heads of a KV head packed into one product.

After Dao et al., "Flash-Decoding for long-context inference" (2023). Two kernels: each program of the first
(``attention_partial.py``) attends a tile of queries to a fixed stretch of the cache and stores partial results in a
workspace, the second (``attention_combine.py``) combines them. A plan of one split needs the first kernel only.

Order of reduction: blocks of keys, and the stretches that splits cover, begin at fixed positions of the cache, which do
not depend on the live length. A block or a split of which a query sees nothing adds 0 and multiplies by 1. With a plan
of ``fixed_order`` the order of a query's reduction therefore depends only on its own position.
The same machine code serves every width. The compiler decides whether a product and a sum are rounded once or twice,
and another version of a kernel might differ in that.

Cost follows the live length: positions are read on the device, and a program whose stretch no query of its tile sees
returns at once. Dead parts of the cache are never loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from speccompile.ops.attention import refuse_sizes
from speccompile.ops.kv_rows import is_rounded_to_8_bits
from speccompile.ops.triton.attention_call import AttentionCall
from speccompile.ops.triton.attention_combine import combine_launch
from speccompile.ops.triton.attention_partial import partial_launch
from speccompile.ops.triton.attention_plan import MOST_KEYS, AttentionPlan, plan_attention, workspace_size
from speccompile.ops.triton.launch import Launch, run_all

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def attention_launches(
    call: AttentionCall, *, out: torch.Tensor, workspace: torch.Tensor, plan: AttentionPlan
) -> tuple[Launch, ...]:
    """The launches: two, or one for a plan of one split.

    Args:
        out: ``[B, T, H, Dv]``, contiguous.
        workspace: float32, at least ``workspace_size`` elements, in any state.
    """
    partial = partial_launch(call, out, workspace, plan)
    return (partial,) if plan.splits == 1 else (partial, combine_launch(call, out, workspace, plan))


def attention(*arguments: Any, fixed_order: bool = False, **options: Any) -> torch.Tensor:
    """``speccompile::attention`` on CUDA; arguments (:class:`AttentionCall`) and result are those of the op's
    ``reference``.

    The op's schema has no workspace; it is allocated here. Under capture it lies in the graph's pool, and all layers
    share one piece of it.

    Raises:
        RuntimeError: for a dtype without a kernel, and for caches whose features are not side by side.
    """
    call = AttentionCall(*arguments, **options)
    q, k_cache, v_cache = call.q, call.k_cache, call.v_cache
    refuse_sizes(call.window, call.chunk)
    if q.dtype not in DTYPES or k_cache.dtype not in (*DTYPES, torch.int8) or v_cache.dtype is not k_cache.dtype:
        raise RuntimeError(
            "speccompile::attention on CUDA accepts queries in float16, bfloat16 or float32, and keys and values of "
            f"one of these dtypes or int8, not {q.dtype}, {k_cache.dtype} and {v_cache.dtype}"
        )
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise RuntimeError("speccompile::attention on CUDA needs caches whose last dimension is contiguous")
    rows, width, heads, _, _, value_dim, _ = call.sizes
    if call.pages is not None and k_cache.shape[1] % MOST_KEYS:
        raise RuntimeError(f"speccompile::attention on CUDA needs pages of a multiple of {MOST_KEYS} positions")
    plan = plan_attention(*call.sizes, q.dtype, fixed_order, is_rounded_to_8_bits(k_cache))
    out = q.new_empty((rows, width, heads, value_dim))
    workspace = q.new_empty(workspace_size(plan, rows, width, heads, value_dim), dtype=torch.float32)
    call = replace(
        call,
        q=q if q.stride(-1) == 1 else q.contiguous(),
        slots=call.slots.contiguous(),
        positions=call.positions.contiguous(),
        sinks=None if call.sinks is None else call.sinks.contiguous(),
        parents=None if call.parents is None else call.parents.contiguous(),
        pages=None if call.pages is None else call.pages.contiguous(),
    )
    run_all(attention_launches(call, out=out, workspace=workspace, plan=plan), q)
    return out
