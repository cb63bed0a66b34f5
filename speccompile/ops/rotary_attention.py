"""Rotary position embeddings, the write of keys and values, and attention as one op."""

from __future__ import annotations

import torch

from speccompile.ops.attention import SCHEMA, refuse_sizes
from speccompile.ops.attention import reference as attention
from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define
from speccompile.ops.kv_rows import to_rows

ROTARY_SCHEMA = SCHEMA.replace(
    "(Tensor q, Tensor k_cache, Tensor v_cache,",
    "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache,",
)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values into the caches, and compute
    :func:`~speccompile.ops.attention.reference`.

    Args:
        q: queries, ``[B, T, H, D]``, not rotated.
        k: keys of the same tokens, ``[B, T, G, D]``, not rotated.
        v: their values, ``[B, T, G, Dv]``.
        cos: cosines by place, ``[B, T, R]`` with an even ``R <= D``. The first R features of each head are rotated.
        sin: sines by place, ``[B, T, R]``.
        k_cache: ``[N, S, G, D]``; row b writes at places ``positions[b]`` of slot ``slots[b]``. The nodes of a tree
            are written at ``positions[b, 0] + i``. If its dtype is another one than that of ``k``, what is written is
            rounded to it.
        v_cache: ``[N, S, G, Dv]``, written at the same places.
        slots: see :func:`~speccompile.ops.attention.reference`, as for all other arguments.

    Returns:
        ``[B, T, H, Dv]`` in the dtype of ``q``.

    Raises:
        RuntimeError: a window or a chunk is below 1.

    Source:
        Su et al., arXiv 2104.09864, in the form of ``apply_rotary_pos_emb`` of transformers'
        ``models/llama/modeling_llama.py``, which rotates halves. Products and sums are in float32, and rounded once.
    """
    refuse_sizes(window, chunk)
    places = positions if parents is None else positions[:, :1] + torch.arange(positions.shape[1], device=q.device)
    at = slots[:, None], places
    if pages is not None:
        at = pages[slots[:, None], places // k_cache.shape[1]], places % k_cache.shape[1]
    k_cache.index_put_(at, to_rows(rotate(k, cos, sin), k_cache.dtype))
    v_cache.index_put_(at, to_rows(v, v_cache.dtype))
    options = scale, window, chunk, softcap, sinks, parents, pages
    return attention(rotate(q, cos, sin), k_cache, v_cache, slots, positions, *options).contiguous()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first R features of ``x [B, T, H, D]`` by ``cos`` and ``sin [B, T, R]``."""
    rotated, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    low, high = rotated.float().chunk(2, dim=-1)
    halves = torch.cat([-high, low], dim=-1)
    turned = rotated.float() * cos.float()[:, :, None] + halves * sin.float()[:, :, None]
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def _fake(q, k, v, *rest, **options):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:3], v.shape[3]))


define("rotary_attention" + ROTARY_SCHEMA, _fake, reference, native=BASE, in_bodies=True, recorded=True)
