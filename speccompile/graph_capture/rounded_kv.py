"""The model's own forward over rounded keys and values.

Each key and value is rounded once, when transformers' cache receives it, as a step rounds it when it writes it. A
forward without a cache rounds nothing, so forwards in :func:`rounding_kv` need ``use_cache=True``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache

from speccompile.ops.kv_rows import from_rows, to_rows

#: All caches of the process share one class, which is changed for one thread at a time.
_lock = threading.RLock()


@contextlib.contextmanager
def rounding_kv(dtype: torch.dtype | None) -> Iterator[None]:
    """In this context this thread's caches of transformers round what they receive to ``dtype``. None rounds
    nothing."""
    if dtype is None:
        yield
        return
    thread = threading.get_ident()
    with _lock:
        unrounded = Cache.update

        def update(
            cache: Cache, key_states: torch.Tensor, value_states: torch.Tensor, *rest: Any, **options: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if threading.get_ident() == thread:
                key_states, value_states = (
                    from_rows(to_rows(given, dtype), given.dtype) for given in (key_states, value_states)
                )
            return unrounded(cache, key_states, value_states, *rest, **options)

        Cache.update = update  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Cache.update = unrounded  # type: ignore[method-assign]
