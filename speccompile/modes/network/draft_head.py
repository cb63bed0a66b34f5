"""Draft heads: small networks that read the target's hidden states, and are not transformers models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

import speccompile.ops  # noqa: F401  registers torch.ops.speccompile
from speccompile.graph.layer_state import KVShape
from speccompile.graph.step_graph import Route


class RowAttention(Protocol):
    """How a head's layers attend. Inference is :class:`HeadCache`; training has another one."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Keep ``key`` and ``value`` ``[B, T, G, D]`` of these rows, and attend with ``query`` ``[B, T, H, D]`` to what
        is kept of the rows' sequences; returns ``[B, T, H, Dv]``. Positions are already in them."""


@dataclass
class HeadCache:
    """The head's KV: each layer writes its KV and attends to that of its row.

    Args:
        keys, values: by layer, ``[N, S, G, D]`` and ``[N, S, G, Dv]``.
        slots: int64 ``[B]``.
        positions: int64 ``[B, T]``.
    """

    keys: Mapping[int, torch.Tensor]
    values: Mapping[int, torch.Tensor]
    slots: torch.Tensor
    positions: torch.Tensor

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """``query`` ``[B, T, H, D]``, ``key`` and ``value`` ``[B, T, G, D]``, positions already in them; returns ``[B,
        T, H, Dv]``. A query attends to the last ``window`` places up to its own, or to all of them."""
        keys, values = self.write(layer, key, value)
        return torch.ops.speccompile.attention(query, keys, values, self.slots, self.positions, scale, window)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep ``key`` and ``value`` ``[B, T, G, D]`` of these rows; returns all that is kept of the layer."""
        place = (self.slots.unsqueeze(1), self.positions)
        self.keys[layer].index_put_(place, key)
        self.values[layer].index_put_(place, value)
        return self.keys[layer], self.values[layer]


class DraftHead(nn.Module):
    """The base of heads that can be captured. The forward takes the sizes that vary (B, T) from its tensors, and no
    Python decision depends on a value.

    Attributes:
        layers: its decoder layers, called as modules; each hands one tensor on.
        lm_head: a module, called once, after the layers.
    """

    layers: nn.ModuleList
    lm_head: nn.Module

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """M of the hidden states that it reads."""

    @property
    @abstractmethod
    def kv(self) -> Mapping[int, KVShape]:
        """The KV shapes of each layer."""

    @property
    def route(self) -> Route:
        """How its layers attend: ``eager`` layers read the whole cache of their rows."""
        return "attention"

    @property
    def numbers(self) -> set[int]:
        """The sizes of its forward that are not those of its weights."""
        return {self.hidden_size}

    @property
    def places_per_row(self) -> int:
        """How many places a row of its forward writes; positions are so far from the end of the KV."""
        return 1

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden_states: torch.Tensor, cache: HeadCache
    ) -> dict[str, torch.Tensor]:
        """``input_ids``, ``position_ids`` ``[B, T]``, ``hidden_states`` ``[B, T, M]``; returns the
        values that passes may read or replace, by name: ``logits`` ``[B, T, Vd]`` and others (``hidden``, ``fused``,
        ...)."""
