"""Attention of a step's rows over their own slots of the KV arena: ONE op, whatever the family.

Two entries with the same meaning. ``attention`` reads exactly the live part of the cache.
``attention_fixed_order`` reads whole blocks of ``BLOCK`` keys, so that the order of reduction for a query
depends on its own position alone and not on how far its row's other queries reach.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Keys are read in multiples of this by attention_fixed_order: the key block of torch's CPU flash attention
# (kvSplitSize, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp). A masked key contributes exactly 0.
BLOCK = 512

SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor slots, Tensor positions, float scale, "
    "int? window=None, float? softcap=None, Tensor? sinks=None, Tensor? parents=None) -> Tensor"
)

_library = torch.library.Library("speccompile", "FRAGMENT")
_library.define("attention" + SCHEMA)
_library.define("attention_fixed_order" + SCHEMA)


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition, in float64 and without any shortcut; the tests hold every kernel against it.

    Args:
        q: queries, ``[B, T, H, D]``.
        k_cache: keys, ``[N, S, G, D]``; those of a step's own tokens are already written.
        v_cache: values, ``[N, S, G, Dv]``.
        slots: int64 ``[B]``, the slot of each row.
        positions: int64 ``[B, T]``, the position of each query; it sees keys at positions up to its own.
        scale: factor on the scores.

    Returns:
        ``[B, T, H, Dv]`` in the dtype of ``q``.
    """
    _refuse_unbuilt(window, softcap, sinks, parents)
    keys, values = k_cache[slots].double(), v_cache[slots].double()
    group = q.shape[2] // keys.shape[2]
    keys, values = keys.repeat_interleave(group, dim=2), values.repeat_interleave(group, dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q.double(), keys) * scale
    visible = torch.arange(keys.shape[1], device=q.device) <= positions[:, None, :, None]
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, values).to(q.dtype)


def _refuse_unbuilt(
    window: int | None, softcap: float | None, sinks: torch.Tensor | None, parents: torch.Tensor | None
) -> None:
    given = {"window": window, "softcap": softcap, "sinks": sinks, "parents": parents}
    asked = [name for name, value in given.items() if value is not None]
    if asked:
        raise RuntimeError(f"speccompile::attention has no kernel for {', '.join(asked)} yet")


def _row_by_row(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    block: int,
) -> torch.Tensor:
    # One SDPA call a row: the cost follows that row's own length, and neither its neighbours nor the unused
    # part of the cache can touch its result. Views only: keys and values are not copied.
    # Flash attention wants a head's features side by side; without that SDPA falls back to plain products.
    q = q if q.stride(-1) == 1 else q.contiguous()
    width = positions.shape[1]
    capacity = k_cache.shape[1]
    out = q.new_empty((*q.shape[:3], v_cache.shape[3]))
    for row, (slot, last) in enumerate(zip(slots.tolist(), positions.amax(1).tolist(), strict=True)):
        length = min((last // block + 1) * block, capacity)
        mask = None
        if width > 1 or length > last + 1:
            mask = torch.arange(length, device=q.device) <= positions[row, :, None]
        out[row] = F.scaled_dot_product_attention(
            q[row : row + 1].transpose(1, 2),
            k_cache[slot : slot + 1, :length].transpose(1, 2),
            v_cache[slot : slot + 1, :length].transpose(1, 2),
            attn_mask=mask,
            scale=scale,
            enable_gqa=q.shape[2] != k_cache.shape[2],
        )[0].transpose(0, 1)
    return out


def _attention(q, k_cache, v_cache, slots, positions, scale, window=None, softcap=None, sinks=None, parents=None):  # type: ignore[no-untyped-def]
    _refuse_unbuilt(window, softcap, sinks, parents)
    return _row_by_row(q, k_cache, v_cache, slots, positions, scale, block=1)


def _attention_fixed_order(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, slots, positions, scale, window=None, softcap=None, sinks=None, parents=None
):
    _refuse_unbuilt(window, softcap, sinks, parents)
    return _row_by_row(q, k_cache, v_cache, slots, positions, scale, block=BLOCK)


def _fake(q, k_cache, v_cache, *rest, **options):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:3], v_cache.shape[3]))


# Library.impl, not torch.library.custom_op: the latter costs tens of microseconds more on every call.
for _name, _kernel in (("attention", _attention), ("attention_fixed_order", _attention_fixed_order)):
    _library.impl(_name, _kernel, "CPU")
    _library.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"speccompile::{_name}", _fake, lib=_library)
