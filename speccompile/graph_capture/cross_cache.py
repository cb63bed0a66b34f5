"""Cross-attention during capture: keys and values of the encoder's output are state that no step changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from speccompile.graph.layer_state import KVShape
from speccompile.graph_capture.cache import StepCache
from speccompile.graph_capture.masks import UnsupportedByRoute


class CrossCache(Cache):
    """Base of both caches of cross-attention.

    Args:
        lengths: int64 ``[B]``, the number of positions of each row's encoder output.
    """

    def __init__(self, lengths: torch.Tensor) -> None:
        super().__init__(layers=[])
        self.lengths = lengths
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def has(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether attention over these tensors is cross-attention."""
        return any(key is known_key and value is known_value for known_key, known_value in self.pairs)


class RecordingCross(CrossCache):
    """A cache that records the sizes of what each layer computes from the encoder's output."""

    def __init__(self, lengths: torch.Tensor) -> None:
        super().__init__(lengths)
        self.observed: dict[int, KVShape] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self.observed:
            raise UnsupportedByRoute(f"attends to the encoder's output twice in layer {layer_idx}")
        key, value = ((int(item.shape[1]), int(item.shape[3])) for item in (key_states, value_states))
        self.observed[layer_idx] = KVShape(key, value, key_states.dtype)
        self.pairs.append((key_states, value_states))
        return key_states, value_states


@dataclass(frozen=True)
class _Layer:
    keys: torch.Tensor
    values: torch.Tensor


class SlotCross(CrossCache):
    """A cache that already has the keys and values of every slot.

    Args:
        keys, values: by layer, ``[N, P, G, D]`` and ``[N, P, G, Dv]``.
        lengths: int64 ``[B]``.
        slots: int64 ``[B]``.
        positions: int64 ``[B, T]``, of the rows' tokens.
        gather: whether a layer receives the keys and values of its rows, ``[B, G, P, D]``, as transformers' own
            attention needs them. Otherwise it receives the whole tensors, for the attention op.
    """

    def __init__(
        self,
        keys: Mapping[int, torch.Tensor],
        values: Mapping[int, torch.Tensor],
        lengths: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        gather: bool,
    ) -> None:
        super().__init__(lengths)
        #: int64 ``[B, T]``, the last position that each query attends to: the row's last one.
        self.ends = (lengths - 1).clamp(min=0)[:, None] + torch.zeros_like(positions)
        self._of_layer: dict[int, _Layer] = {}
        for layer in keys:
            pair = [keys[layer], values[layer]]
            if gather:
                pair = [item[slots].transpose(1, 2).contiguous() for item in pair]
            self._of_layer[layer] = _Layer(*pair)
            self.pairs.append((pair[0], pair[1]))
        self.layers: Any = self._of_layer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        # Not 0: what each layer attends to is already there.
        return 1


def with_cross(cache: StepCache, cross: CrossCache | None) -> Cache:
    """The cache for a forward: ``cache`` itself for a decoder-only model, else both as transformers joins them."""
    return cache if cross is None else EncoderDecoderCache(cache, cross)
