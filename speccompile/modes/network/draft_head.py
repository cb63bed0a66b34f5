"""Draft heads: small networks that read the target's hidden states. They are not transformers models."""

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
    """The attention of a head's layers. :class:`HeadCache` implements it for inference; training has its own
    implementation."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Store ``key`` and ``value`` ``[B, T, G, D]``, and attend with ``query`` ``[B, T, H, D]`` to the stored KV of
        the rows' sequences.

        Rotary positions are already applied. Returns ``[B, T, H, Dv]``.
        """


@dataclass
class HeadCache:
    """The head's KV in the arena. Each layer writes its KV, and attends to that of its row's slot.

    Args:
        keys, values: ``[N, S, G, D]`` and ``[N, S, G, Dv]``, by layer.
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
        """Store ``key`` and ``value`` ``[B, T, G, D]``, and attend with ``query`` ``[B, T, H, D]``.

        Rotary positions are already applied. A query attends to the last ``window`` positions up to its own; None is
        all of them. Returns ``[B, T, H, Dv]``.
        """
        keys, values = self.write(layer, key, value)
        return torch.ops.speccompile.attention(query, keys, values, self.slots, self.positions, scale, window)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``key`` and ``value`` ``[B, T, G, D]`` of these rows. Returns the layer's whole keys and values."""
        place = (self.slots.unsqueeze(1), self.positions)
        self.keys[layer].index_put_(place, key)
        self.values[layer].index_put_(place, value)
        return self.keys[layer], self.values[layer]


class DraftHead(nn.Module):
    """The base class of heads that can be captured.

    The forward reads the sizes that vary (B, T) from its tensors. Its Python control flow does not depend on values of
    tensors.

    Attributes:
        layers: its decoder layers, called as modules. Each returns one tensor.
        lm_head: a module, called once, after the layers.
    """

    layers: nn.ModuleList
    lm_head: nn.Module

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """The size of the hidden states that it reads."""

    @property
    @abstractmethod
    def kv(self) -> Mapping[int, KVShape]:
        """The KV shapes of each layer."""

    @property
    def route(self) -> Route:
        """The route by which its attention is captured. ``eager`` layers read the whole cache of their rows."""
        return "attention"

    @property
    def numbers(self) -> set[int]:
        """Sizes in its forward that are not sizes of its weights. The example sizes of the capture do not divide
        them."""
        return {self.hidden_size}

    @property
    def compared(self) -> tuple[str, ...]:
        """The values of its forward that the check of its capture compares; all have one shape."""
        return ("logits",)

    @property
    def places_per_row(self) -> int:
        """The number of positions that a row of its forward writes in the KV."""
        return 1

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden_states: torch.Tensor, cache: HeadCache
    ) -> dict[str, torch.Tensor]:
        """Compute rows of the head.

        Args:
            input_ids, position_ids: int64 ``[B, T]``.
            hidden_states: ``[B, T, M]``.

        Returns:
            The values that passes can read or replace, by name: ``logits`` ``[B, T, Vd]``, and others such as
                ``hidden`` and ``fused``.
        """
