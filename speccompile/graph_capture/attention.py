"""The seam in transformers: an attention implementation and a mask function of ours, used only during capture.

The mask function records what the model asks for and refuses what the attention op cannot express. Without it
transformers would pass no mask at all to an implementation it does not know, and some families would silently
lose causality.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

import speccompile.lowering.ops  # noqa: F401  registers torch.ops.speccompile
from speccompile.errors import UnsupportedModel
from speccompile.graph_capture.state import KVShape

NAME = "speccompile"


@dataclass(frozen=True)
class CausalMask:
    """The mask a layer asked for: every key up to the query's own position."""


class SlotCache(Cache):
    """The KV arena as transformers sees it: writes go to ``(slots, positions)``, reads get the whole tensors.

    Args:
        keys, values: per layer ``[N, S, G, D]`` and ``[N, S, G, Dv]``.
        slots: int64 ``[B]``.
        positions: int64 ``[B, T]``, each row's own.
    """

    def __init__(
        self,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        super().__init__(layers=[])
        self.keys, self.values, self.slots, self.positions = keys, values, slots, positions

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        place = (self.slots.unsqueeze(1), self.positions)
        key, value = self.keys[layer_idx], self.values[layer_idx]
        key.index_put_(place, key_states.transpose(1, 2))
        value.index_put_(place, value_states.transpose(1, 2))
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return int(self.keys[0].shape[1]), 0


class RecordingCache(Cache):
    """Hands keys and values back untouched and remembers their sizes: KV shapes are observed, not computed."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.observed: dict[int, KVShape] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def heads(x: torch.Tensor) -> tuple[int, int]:
            return int(x.shape[1]), int(x.shape[3])

        self.observed[layer_idx] = KVShape(heads(key_states), heads(value_states), key_states.dtype)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


_running: list[SlotCache] = []


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    where = type(module).__name__
    if not isinstance(attention_mask, CausalMask):
        raise UnsupportedModel(model=where, reason=f"its attention mask is {attention_mask!r}, not plain causal")
    asked = {name: options.get(name) for name in ("softcap", "s_aux", "sliding_window")}
    if given := [f"{name}={value!r}" for name, value in asked.items() if value is not None]:
        raise UnsupportedModel(model=where, reason=f"its attention uses {', '.join(given)}")
    cache = _running[-1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = torch.ops.speccompile.attention(query.transpose(1, 2), key, value, cache.slots, cache.positions, scale)
    return out, None


def _mask(mask_function: Any = None, **arguments: Any) -> CausalMask:
    if mask_function is not causal_mask_function:
        raise UnsupportedModel(model="the model", reason=f"it asks for the attention mask {mask_function!r}")
    return CausalMask()


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


@contextlib.contextmanager
def captured_attention(model: PreTrainedModel) -> Iterator[None]:
    """``model`` uses the semantic attention op inside; its own setting is back afterwards."""
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


@contextlib.contextmanager
def running(cache: SlotCache) -> Iterator[None]:
    """Attention calls inside read slots and positions from ``cache``."""
    _running.append(cache)
    try:
        yield
    finally:
        _running.pop()
