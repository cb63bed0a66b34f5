"""The model's own forward over rounded keys and values.

Each key and value is rounded once, when transformers' cache receives it, as a step rounds it when it writes it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from speccompile.graph_capture.altering import altering

_update = Cache.update
_lock = threading.RLock()


@contextlib.contextmanager
def rounding_kv(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """In this context this thread's caches of transformers round what they receive to ``dtype``, and every forward of
    ``model`` uses one. None rounds nothing."""
    if dtype is None:
        yield
        return
    thread = threading.get_ident()

    def update(
        cache: Cache, key_states: torch.Tensor, value_states: torch.Tensor, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if threading.get_ident() == thread:
            key_states, value_states = (given.to(dtype).to(given.dtype) for given in (key_states, value_states))
        return _update(cache, key_states, value_states, *rest, **options)

    def use_cache(_module: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, options | {"use_cache": True}

    # One at a time: the class is shared by all models.
    with _lock, altering(model):
        handle = model.register_forward_pre_hook(use_cache, with_kwargs=True)
        Cache.update = update  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Cache.update = _update  # type: ignore[method-assign]
            handle.remove()
