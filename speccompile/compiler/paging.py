"""The size of the pool of pages of KV."""

from __future__ import annotations

from speccompile.errors import InvalidOption
from speccompile.graph.paging import Paging
from speccompile.graph.state import Layout
from speccompile.utils.kv_memory import KVMemory


def plan_paging(layout: Layout, memory: KVMemory, ahead: int) -> Paging:
    """The pool for ``layout``, which has a piece of KV for each slot. ``ahead`` is as for
    :class:`~speccompile.graph.paging.Paging`.

    Raises:
        InvalidOption: the pool that the caller gave cannot hold one sequence of ``max_len`` tokens.
    """
    kept = [tensor for tensor in layout.tensors.values() if tensor.in_pages]
    of_page = memory.page * sum(tensor.nbytes // (tensor.shape[0] * tensor.shape[1]) for tensor in kept)
    per_slot = -(-layout.cache_len // memory.page)
    if memory.nbytes is not None:
        count = memory.nbytes // max(1, of_page)
    else:
        assert memory.tokens is not None
        count = -(-memory.tokens // memory.page)
    if memory.given is None:
        count = max(count, per_slot)
    elif count < per_slot:
        needed = f"{per_slot * memory.page} tokens, {per_slot * of_page / 2**20:.0f} MiB"
        reason = f"one sequence of max_len={layout.max_len} tokens needs {needed}; give more, or a smaller max_len"
        raise InvalidOption(where="wrap", name="kv_memory", value=memory.given, reason=reason)
    # More than all slots can use would stay empty. One page more is for positions that no request owns.
    # A new wrap is compared with the model in two slots.
    return Paging(1 + max(2, min(count, layout.max_batch * per_slot)), per_slot, ahead, memory.page)
