"""The KV arena as transformers sees it: ``Cache`` subclasses that stand in during capture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache

from speccompile.graph.state import KVShape
from speccompile.graph_capture.masks import UnsupportedByRoute

RECURRENT = "keeps a recurrent or linear-attention state, which cannot be rewound to the accepted tokens yet"


class StepCache(Cache):
    """What both stand-ins say to a model's questions: positions are inputs, and there is no one length.

    Args:
        length: what the cache says its length is. A model that reads it counts positions itself.
    """

    def __init__(self, length: int = 0) -> None:
        super().__init__(layers=[])
        self.length = length
        # What update returned: attention over anything else is attention over something changed.
        self.returned: list[tuple[torch.Tensor, torch.Tensor]] = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def _no_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedByRoute(RECURRENT)

    get_conv_state = update_conv_state = _no_state
    get_recurrent_state = update_recurrent_state = _no_state
    has_previous_state = _no_state

    def update_indexer(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedByRoute("chooses the keys to attend to by an index of its own")


class SlotCache(StepCache):
    """Writes go to ``(slots, positions)``.

    Args:
        keys, values: by layer, ``[N, S, G, D]`` and ``[N, S, G, Dv]``.
        slots: int64 ``[B]``.
        positions: int64 ``[B, T]``, each row's own.
        gather: whether a layer reads its rows alone, as ``[B, G, S, D]``, which is what transformers' own attention
            takes; otherwise it is handed the whole tensors, for the attention op.
    """

    def __init__(
        self,
        keys: Mapping[int, torch.Tensor],
        values: Mapping[int, torch.Tensor],
        slots: torch.Tensor,
        positions: torch.Tensor,
        gather: bool,
    ) -> None:
        super().__init__()
        self.keys, self.values, self.slots, self.positions, self.gather = keys, values, slots, positions, gather

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        place = (self.slots.unsqueeze(1), self.positions)
        key, value = self.keys[layer_idx], self.values[layer_idx]
        key.index_put_(place, key_states.transpose(1, 2))
        value.index_put_(place, value_states.transpose(1, 2))
        if self.gather:
            # Contiguous, as transformers' own cache hands them out: some models take a view of the result.
            return key[self.slots].transpose(1, 2).contiguous(), value[self.slots].transpose(1, 2).contiguous()
        self.returned.append((key, value))
        return key, value

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return next(iter(self.keys.values())).shape[1], 0


class RecordingCache(StepCache):
    """Hands keys and values back untouched and remembers their sizes: KV shapes are observed, not computed."""

    def __init__(self, length: int = 0) -> None:
        super().__init__(length)
        self.observed: dict[int, KVShape] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def heads(x: torch.Tensor) -> tuple[int, int]:
            return int(x.shape[1]), int(x.shape[3])

        if layer_idx in self.observed:
            raise UnsupportedByRoute(f"writes the KV of layer {layer_idx} twice in one forward")
        self.observed[layer_idx] = KVShape(heads(key_states), heads(value_states), key_states.dtype)
        self.returned.append((key_states, value_states))
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0
