"""Attention of a step's rows over their own slots of the KV arena: one op for all families.

Two entries compute the same function. ``attention`` reads exactly the live part of the cache.
``attention_fixed_order`` reads whole blocks of ``BLOCK`` keys from the first one on: the order of reduction for a query
depends only on its own position, not on the positions of its row's other queries. It masks the dead cache positions
that it reads. Their keys and values must be finite, because 0 times NaN is NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from speccompile.ops.define import define
from speccompile.ops.kv_rows import features_of, from_rows, is_rounded_to_8_bits
from speccompile.ops.on_cuda import in_triton

# Keys are read in multiples of this by attention_fixed_order: the key block of torch's CPU flash attention
# (kvSplitSize, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp). A masked key contributes exactly 0.
BLOCK = 512

# Queries are multiplied in multiples of this by attention_fixed_order: MKL sums the same row in different orders in
# products of 1, 2 and 4 rows, and a remainder shared among threads differs from the rest (seen with AVX-512).
TILE = 16

SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor slots, Tensor positions, float scale, int? window=None, "
    "int? chunk=None, float? softcap=None, Tensor? sinks=None, Tensor? parents=None, Tensor? pages=None) -> Tensor"
)
# The C++ kernel does not have ALiBi.
SCHEMA_WITH_ALIBI = SCHEMA.replace(") ->", ", bool alibi=False) ->")


def reference(
    q: torch.Tensor,
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
    alibi: bool = False,
) -> torch.Tensor:
    """The definition, in float64 and without any shortcut; the tests hold every kernel against it.

    Args:
        q: queries, ``[B, T, H, D]``.
        k_cache: keys, ``[N, S, G, D]``; those of a step's own tokens are already written. Their dtype may be another
            one than that of the queries.
        v_cache: values, ``[N, S, G, Dv]``, in the dtype of the keys.
        slots: int64 ``[B]``, the slot of each row.
        positions: int64 ``[B, T]``, the position of each query; it sees keys at positions up to its own.
        scale: factor on the scores.
        window: a query sees only this many positions, its own the last of them.
        chunk: a query sees only its own chunk, where positions are cut into chunks of this many.
        softcap: scores are squeezed between plus and minus this before anything is hidden.
        sinks: ``[H]``, one more logit for each head, whose share of the softmax is dropped.
        parents: int64 ``[B, T]``, where a row's queries are the nodes of a tree: the index of each node's parent in
            the row, -1 for the root, which is node 0, and for other roots beside it, at its position. The key of node i
            stands at place ``positions[b, 0] + i`` of the cache; its position, ``positions[b, i]``, is the root's plus
            its depth. A node sees the places before the root's, where place and position are one, its ancestors and
            itself; window and chunk go by positions. ``parents[b, i] = i - 1`` is the chain that None stands for.
        pages: int64 ``[N, M]``, where the caches are pools of pages, ``[P, C, G, D]`` and ``[P, C, G, Dv]``: position
            p of slot n is place ``p % C`` of page ``pages[n, p // C]``. Pages after a row's last position may be any.
        alibi: add to each score the key's position minus the query's, times the slope of the head
            (:func:`alibi_slopes`).

    Returns:
        ``[B, T, H, Dv]`` in the dtype of ``q``.
    """
    refuse_sizes(window, chunk)
    keys, values = (from_rows(cache_of_rows(cache, slots, pages), torch.float64) for cache in (k_cache, v_cache))
    group = q.shape[2] // keys.shape[2]
    keys, values = keys.repeat_interleave(group, dim=2), values.repeat_interleave(group, dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q.double(), keys) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    places = torch.arange(keys.shape[1], device=q.device)
    if parents is None:
        visible = _visible(places, positions, window, chunk)
    else:
        visible = _visible_in_tree(places, positions, parents, window, chunk)
    if alibi:
        distance = _key_positions(places, positions)[:, None] - positions[:, :, None]
        scores = scores + alibi_slopes(q.shape[2], q.device).double()[:, None, None] * distance[:, None]
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand_as(scores[..., :1])], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    # What no query sees may be anything.
    values = values.masked_fill(~visible.any(1)[:, :, None, None], 0.0)
    return torch.einsum("bhts,bshd->bthd", weights, values).to(q.dtype)


def cache_of_rows(cache: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor | None) -> torch.Tensor:
    """Keys or values ``[B, S, ...]`` of ``slots`` ``[B]``, from a cache ``[N, S, ...]`` or a pool of pages."""
    return cache[slots] if pages is None else cache[pages[slots]].flatten(1, 2)


def _in_order(cache: torch.Tensor, slot: int, start: int, stop: int, pages: torch.Tensor | None) -> torch.Tensor:
    """Positions ``start`` to ``stop`` of one slot: a view of ``cache``, or a copy of its pages."""
    if pages is None:
        return cache[slot, start:stop]
    size = cache.shape[1]
    first = start // size
    found = cache[pages[slot, first : -(-stop // size)]].flatten(0, 1)
    return found[start - first * size : stop - first * size]


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """float32 ``[H]``: ``2 ** (-8 * i / p)`` for i = 1 ... p, the greatest power of 2 in H; for more heads also ``2 **
    (-4 * i / p)`` for odd i. Source: Press et al., arXiv 2108.12409, section 3, and their code for other numbers of
    heads.
    """
    power = 1 << (heads.bit_length() - 1)
    halves = [*range(2, 2 * power + 1, 2), *range(1, 2 * (heads - power), 2)]
    return torch.tensor([2.0 ** (-4 * half / power) for half in halves], device=device)


def refuse_sizes(window: int | None, chunk: int | None) -> None:
    """Raise RuntimeError for a window or a chunk below 1."""
    for name, size in (("window", window), ("chunk", chunk)):
        if size is not None and size < 1:
            raise RuntimeError(f"speccompile::attention needs a {name} of at least 1, not {size}")


def _visible(keys: torch.Tensor, positions: torch.Tensor, window: int | None, chunk: int | None) -> torch.Tensor:
    """Mask of the ``keys`` (their positions, ``[L]``) that queries at ``positions`` (``[..., T]``) see: bool ``[..., T,
    L]``.
    """
    own = positions[..., None]
    visible = keys <= own
    if window is not None:
        visible = visible & (keys > own - window)
    if chunk is not None:
        visible = visible & (keys // chunk == own // chunk)
    return visible


def _key_positions(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Positions of ``keys`` (their indices in the cache, ``[L]``): ``[B, L]``. Those of the step's own tokens are
    ``positions``, also if these are the nodes of a tree.
    """
    found = keys.repeat(len(positions), 1)
    for row, own in enumerate(positions):
        root = int(own[0])
        found[row, root : root + len(own)] = own[: len(keys) - root]
    return found


def _visible_in_tree(
    keys: torch.Tensor, positions: torch.Tensor, parents: torch.Tensor, window: int | None, chunk: int | None
) -> torch.Tensor:
    """Mask of the ``keys`` that the nodes of trees see, computed row by row and node by node: bool ``[B, T, L]``."""
    rows, width = parents.shape
    visible = torch.zeros(rows, width, len(keys), dtype=torch.bool, device=keys.device)
    of_keys = _key_positions(keys, positions)
    for row in range(rows):
        root = int(positions[row, 0])
        seen = torch.zeros_like(visible[row])
        seen[:, :root] = True
        for node in range(width):
            ancestor = node
            while ancestor >= 0:
                seen[node, root + ancestor] = True
                ancestor = int(parents[row, ancestor])
        visible[row] = seen & _visible(of_keys[row], positions[row], window, chunk)
    return visible


def _row_by_row(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    pages: torch.Tensor | None,
    alibi: bool,
    fixed_order: bool,
) -> torch.Tensor:
    # One call a row: the cost follows that row's own length, and neither its neighbours nor the unused
    # part of the cache can touch its result. Views only: keys and values of the queries' dtype are not copied (half
    # precision is widened for plain products, a block at a time).
    # Flash attention needs a head's features side by side; without that SDPA falls back to plain products.
    q = q if q.stride(-1) == 1 else q.contiguous()
    # SDPA has none of these options. If keys and values differ in size, its CPU kernel is one of plain products too,
    # with an order that depends on the width and the KV heads copied for every query head.
    options = softcap is not None or sinks is not None or alibi
    products = options or k_cache.shape[3] != v_cache.shape[3]
    out = q.new_empty((*q.shape[:3], features_of(v_cache)))
    capacity = k_cache.shape[1] * (1 if pages is None else pages.shape[1])
    for row, (slot, places) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        lowest, stop = min(places), max(places) + 1
        start = max(0, 0 if window is None else lowest - window + 1, 0 if chunk is None else lowest - lowest % chunk)
        exact = start, stop
        if fixed_order:
            # A window hides keys but does not move the blocks.
            start, stop = 0, min(-(-stop // BLOCK) * BLOCK, capacity)
        visible = None
        if len(places) > 1 or (start, stop) != exact:
            visible = _visible(torch.arange(start, stop, device=q.device), positions[row], window, chunk)
        keys, values = (_in_order(cache, slot, start, stop, pages) for cache in (k_cache, v_cache))
        if pages is not None:
            # Other rows write in pages that are not this row's.
            keys[exact[1] - start :], values[exact[1] - start :] = 0.0, 0.0
        if is_rounded_to_8_bits(k_cache):
            keys, values = from_rows(keys, q.dtype), from_rows(values, q.dtype)
        if products:
            tile = TILE if fixed_order else 1
            bias = None
            if alibi:
                distance = torch.arange(start, stop, device=q.device) - positions[row][:, None]
                bias = alibi_slopes(q.shape[2], q.device)[:, None, None] * distance
            out[row] = _products(q[row], keys, values, visible, scale, softcap, sinks, bias, tile)
            continue
        out[row] = F.scaled_dot_product_attention(
            q[row : row + 1].transpose(1, 2),
            keys.to(q.dtype)[None].transpose(1, 2),
            values.to(q.dtype)[None].transpose(1, 2),
            attn_mask=visible,
            scale=scale,
            enable_gqa=q.shape[2] != k_cache.shape[2],
        )[0].transpose(0, 1)
    return out


def _node_by_node(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    parents: torch.Tensor,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    pages: torch.Tensor | None,
    alibi: bool,
) -> torch.Tensor:
    """Attention of each tree node over a copy of the keys on its path, in the order of their positions."""
    out = q.new_empty((*q.shape[:3], features_of(v_cache)))
    for row, slot in enumerate(slots.tolist()):
        root, ancestors = int(positions[row, 0]), parents[row].tolist()
        for node, position in enumerate(positions[row].tolist()):
            path = [node]
            while (ancestor := ancestors[path[-1]]) >= 0:
                path.append(ancestor)
            places = torch.tensor([*range(root), *(root + on_path for on_path in reversed(path))], device=q.device)
            own = slice(row, row + 1), slice(node, node + 1)
            keys, values = (_at_places(cache, slot, places, pages)[None] for cache in (k_cache, v_cache))
            alone, at = slots.new_zeros(1), torch.tensor([[position]], device=q.device)
            options = scale, window, chunk, softcap, sinks, None, alibi
            out[own] = _row_by_row(q[own], keys, values, alone, at, *options, fixed_order=False)
    return out


def _at_places(cache: torch.Tensor, slot: int, places: torch.Tensor, pages: torch.Tensor | None) -> torch.Tensor:
    """Some places of one slot, ``[L, G, D]``."""
    if pages is None:
        return cache[slot, places]
    size = cache.shape[1]
    return cache[pages[slot, places // size], places % size]


def _products(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    tile: int,
) -> torch.Tensor:
    """One row's queries ``[T, H, D]`` over keys ``[L, G, D]`` and values ``[L, G, Dv]``: ``[T, H, Dv]``.

    The queries of all heads of a group are multiplied with its keys at once, in float32 and a block of keys at a
    time, under a running softmax; ``visible`` is ``[T, L]``, or None where every query sees every key; ``bias`` is
    ``[H, T, L]`` or None.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    width, groups = len(q), keys.shape[1]
    queries = q.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # [G, H/G*T, D]
    count = queries.shape[1]
    padding = (0, 0, 0, -count % tile)
    queries = F.pad(queries.to(wide) * (scale if softcap is None else scale / softcap), padding)
    out = queries.new_zeros((*queries.shape[:2], values.shape[2]))
    # The greatest logit so far and the sum of weights relative to it. A sink is a logit that came before any key.
    # Without one the greatest is finite all the same: a whole block may be hidden, and -inf - -inf is not a weight.
    top, total = torch.full_like(out[..., :1], torch.finfo(wide).min), torch.zeros_like(out[..., :1])
    if sinks is not None:
        top = F.pad(sinks.to(wide).repeat_interleave(width).view(groups, count, 1), padding)
        total = torch.ones_like(top)
    for start in range(0, len(keys), BLOCK):
        block = slice(start, start + BLOCK)
        scores = torch.bmm(queries, keys[block].permute(1, 2, 0).to(wide))
        if softcap is not None:
            scores = scores.tanh_().mul_(softcap)
        if bias is not None:
            scores[:, :count] += bias[..., block].reshape(groups, count, -1)
        if visible is not None:
            scores[:, :count].unflatten(1, (-1, width)).masked_fill_(~visible[:, block], float("-inf"))
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, shrink = scores.sub_(higher).exp_(), (top - higher).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + torch.bmm(weights, values[block].transpose(0, 1).to(wide))
        top = higher
    return (out / total)[:, :count].unflatten(1, (-1, width)).permute(2, 0, 1, 3).flatten(1, 2)


def _attention(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    slots,
    positions,
    scale,
    window=None,
    chunk=None,
    softcap=None,
    sinks=None,
    parents=None,
    pages=None,
    alibi=False,
):
    refuse_sizes(window, chunk)
    options = scale, window, chunk, softcap, sinks, pages, alibi
    if parents is not None:
        return _node_by_node(q, k_cache, v_cache, slots, positions, parents, *options)
    return _row_by_row(q, k_cache, v_cache, slots, positions, *options, fixed_order=False)


def _attention_fixed_order(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    slots,
    positions,
    scale,
    window=None,
    chunk=None,
    softcap=None,
    sinks=None,
    parents=None,
    pages=None,
    alibi=False,
):
    refuse_sizes(window, chunk)
    if parents is not None:
        raise RuntimeError("speccompile::attention_fixed_order has no kernel for parents; call speccompile::attention")
    options = scale, window, chunk, softcap, sinks, pages, alibi
    return _row_by_row(q, k_cache, v_cache, slots, positions, *options, fixed_order=True)


def _fake(q, k_cache, v_cache, *rest, **options):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:3], features_of(v_cache)))


for _name, _kernel in (("attention", _attention), ("attention_fixed_order", _attention_fixed_order)):
    _on_cuda = in_triton("attention.attention", fixed_order=_kernel is _attention_fixed_order)
    define(_name + SCHEMA_WITH_ALIBI, _fake, _kernel, key="CPU", cuda=_on_cuda)
