"""ALiBi: attention of BLOOM and MPT by the attention op, whose scores depend on distances, with a slope for each head.

transformers' own modules add the bias of all keys of a cache to their scores, without an attention interface. Source:
``BloomAttention``, ``MptAttention`` (transformers, ``models/bloom/modeling_bloom.py``, ``models/mpt/modeling_mpt.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from speccompile.graph.step_graph import Route
from speccompile.graph_capture.attention import captured_attention, current_run
from speccompile.utils.devices import traits_of


@contextlib.contextmanager
def alibi_captured(model: nn.Module, route: Route) -> Iterator[None]:
    """Let layers with ALiBi call the attention op in this context, if ``route`` is ``attention`` and the device has the
    trait ``replaces_attention``. No other code may run ``model`` meanwhile."""
    layers = [layer for layer in model.modules() if type(layer).__name__ in FORWARDS] if route == "attention" else []
    layers = [layer for layer in layers if traits_of(next(layer.parameters()).device).replaces_attention]
    for layer in layers:
        layer.forward = MethodType(FORWARDS[type(layer).__name__], layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _bloom(
    self: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    out = _attend(self, query, key, value, attention_mask, self.inv_norm_factor)
    return self.dense(out) + residual, None


def _mpt(
    self: Any, hidden_states: torch.Tensor, position_bias: torch.Tensor, attention_mask: Any = None, **options: Any
) -> tuple[torch.Tensor, None]:
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    return self.out_proj(_attend(self, query, key, value, attention_mask, self.softmax_scale)), None


def _attend(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float
) -> torch.Tensor:
    """Attend with queries ``[B, H, T, D]`` to the cache, updated with these tokens; returns ``[B, T, H * D]``."""
    run = current_run()
    assert run is not None
    key, value = run.cache.update(key, value, layer.layer_idx)
    out, _ = captured_attention(layer, query, key, value, mask, scaling=scale, with_alibi=True)
    return out.flatten(2)


#: Forwards by the name of transformers' class.
FORWARDS: dict[str, Callable[..., tuple[torch.Tensor, None]]] = {"BloomAttention": _bloom, "MptAttention": _mpt}
