"""The arena as transformers sees it: ``Cache`` subclasses that stand in during capture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers.cache_utils import Cache

from speccompile.graph.layer_state import IndexShape, KVShape, RecurrentShape
from speccompile.graph_capture.latent import cached_latents
from speccompile.graph_capture.masks import UnsupportedByRoute
from speccompile.utils.transformers_version import ASKS_FOR_STATE

INDEX = "chooses the keys to attend to by an index of another kind than DeepSeek-V3.2's"
RECURRENT = "keeps a recurrent or linear-attention state of a kind that is not captured yet"


class StepCache(Cache):
    """What both stand-ins answer to a model's questions: positions are inputs, there is no one length, and a recurrent
    layer has no state before this forward, so that it takes its form for many tokens.

    Args:
        length: what the cache says its length is. A model that reads it counts positions itself.
    """

    def __init__(self, length: int = 0) -> None:
        super().__init__(layers=[])
        self.length = length
        # What update returned: attention over anything else is attention over something changed.
        self.returned: list[tuple[torch.Tensor, torch.Tensor]] = []
        # What update_conv_state returned and no convolution has read yet, by the name of its state.
        self._unread: dict[str, torch.Tensor] = {}
        # Recurrences of the newest layer that asked for a state.
        self._layer = -1
        self._recurrences = 0
        # The layer whose keys and values came last.
        self.newest = -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> torch.Tensor:
        """The inputs of a layer's convolution, ``[B, C, T]``, as they are: the op reads those before them."""
        name = f"conv_{layer_idx}" if state_idx == 0 else f"conv_{layer_idx}_{state_idx}"
        self._unread[name] = conv_states
        if not ASKS_FOR_STATE:
            # Every recurrence of these versions follows a convolution of its layer.
            self._begin_recurrences(layer_idx)
        return conv_states

    def conv_of(self, inputs: torch.Tensor) -> str:
        """The state of the convolution that reads ``inputs``, which :meth:`update_conv_state` returned."""
        found = [name for name, given in self._unread.items() if given is inputs]
        if not found:
            raise UnsupportedByRoute("convolves something else than it put into the cache")
        del self._unread[found[0]]
        return found[0]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._begin_recurrences(layer_idx)

    def _begin_recurrences(self, layer_idx: int) -> None:
        self._layer, self._recurrences = layer_idx, 0

    def recurrence(self, kind: str) -> str:
        """The state of the next recurrence of the layer that asked for one. A layer may have several."""
        if self._layer < 0:
            raise UnsupportedByRoute(RECURRENT)
        self._recurrences += 1
        name = f"{kind}_{self._layer}"
        return name if self._recurrences == 1 else f"{name}_{self._recurrences - 1}"

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> torch.Tensor:
        """The op has written the state; what is not a recurrence of ours has none."""
        if layer_idx != self._layer or self._recurrences == 0:
            raise UnsupportedByRoute(RECURRENT)
        self._layer = -1
        return recurrent_states

    def check_read(self) -> None:
        """Raises UnsupportedByRoute: a layer keeps inputs that no convolution of ours has read."""
        if self._unread:
            raise UnsupportedByRoute(f"{RECURRENT} ({', '.join(self._unread)})")

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


@dataclass(frozen=True)
class Recurrent:
    """The state of recurrent layers in a step, and where that of each row stands: :mod:`speccompile.ops.recurrence`.

    Args:
        tensors: of the arena, by name.
        absorbed, settled: int64 ``[B]``.
        prompt: int64 ``[B]``, how many tokens of each row are its prompt's.
    """

    tensors: Mapping[str, torch.Tensor]
    absorbed: torch.Tensor
    settled: torch.Tensor
    prompt: torch.Tensor


class SlotCache(StepCache):
    """Writes go to ``(slots, positions)``.

    Args:
        keys, values: by layer, ``[N, S, G, D]`` and ``[N, S, G, Dv]``.
        slots: int64 ``[B]``.
        positions: int64 ``[B, T]``, each row's own.
        gather: whether a layer reads its rows alone, as ``[B, G, S, D]``, which is what transformers' own attention
            takes; otherwise it is handed the whole tensors, for the attention op.
        recurrent: state of recurrent layers; None where there are none.
        index: keys of layers that choose by an index what they attend to, ``[N, S, size]``.
    """

    def __init__(
        self,
        keys: Mapping[int, torch.Tensor],
        values: Mapping[int, torch.Tensor],
        slots: torch.Tensor,
        positions: torch.Tensor,
        gather: bool,
        recurrent: Recurrent | None = None,
        index: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.index = index
        self.keys, self.values, self.slots, self.positions, self.gather = keys, values, slots, positions, gather
        self._recurrent = recurrent

    @property
    def recurrent(self) -> Recurrent:
        """The recurrent state of the layers.

        Raises:
            UnsupportedByRoute: this capture has none.
        """
        if self._recurrent is None:
            raise UnsupportedByRoute(RECURRENT)
        return self._recurrent

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        place = (self.slots.unsqueeze(1), self.positions)
        key, value = self.keys[layer_idx], self.values[layer_idx]
        given = key_states, value_states
        if self._keeps_latents(layer_idx, key_states):
            key_states, value_states = cached_latents(*given)
        key.index_put_(place, key_states.transpose(1, 2))
        value.index_put_(place, value_states.transpose(1, 2))
        if self.gather:
            # Contiguous, as transformers' own cache hands them out: some models take a view of the result.
            return key[self.slots].transpose(1, 2).contiguous(), value[self.slots].transpose(1, 2).contiguous()
        self.newest = layer_idx
        if self._keeps_latents(layer_idx, given[0]):
            # They are expanded in vain: the attention op reads the latents.
            return given
        self.returned.append((key, value))
        return key, value

    def _keeps_latents(self, layer_idx: int, latent: torch.Tensor) -> bool:
        """Whether ``latent`` is cached together with its rotary key."""
        return self.keys[layer_idx].shape[-1] != latent.shape[-1]

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """``[B, T, size]``; returns those of all places of the rows, ``[B, S, size]``."""
        if layer_idx not in self.index:
            raise UnsupportedByRoute(INDEX)
        keys = self.index[layer_idx]
        keys.index_put_((self.slots.unsqueeze(1), self.positions), indexer_key_states)
        return keys[self.slots]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return next(iter(self.keys.values())).shape[1], 0


class RecordingCache(StepCache):
    """Hands keys and values back untouched and remembers their sizes: shapes of state are observed, not computed."""

    def __init__(self, length: int = 0) -> None:
        super().__init__(length)
        self.observed: dict[int, KVShape] = {}
        self.recurrent: dict[str, RecurrentShape] = {}
        self.index: dict[int, IndexShape] = {}

    def note(self, name: str, shape: RecurrentShape) -> None:
        """Remember what a recurrence keeps.

        Raises:
            UnsupportedByRoute: a layer ran twice.
        """
        if name in self.recurrent:
            raise UnsupportedByRoute(f"writes the state {name} twice in one forward")
        self.recurrent[name] = shape

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def heads(x: torch.Tensor) -> tuple[int, int]:
            return int(x.shape[1]), int(x.shape[3])

        if layer_idx in self.observed:
            raise UnsupportedByRoute(f"writes the KV of layer {layer_idx} twice in one forward")
        self.observed[layer_idx] = KVShape(heads(key_states), heads(value_states), key_states.dtype)
        self.newest = layer_idx
        self.returned.append((key_states, value_states))
        return key_states, value_states

    def keep_latents(self) -> None:
        """The newest layer attends to its latents: they are cached as :func:`cached_latents` has them.

        Raises:
            UnsupportedByRoute: it has several for each token.
        """
        shape = self.observed[self.newest]
        (heads, rank), (_, rotary) = shape.key, shape.value
        if heads != 1:
            raise UnsupportedByRoute("keeps several latents of each token")
        self.observed[self.newest] = KVShape((1, rank + rotary), (1, rank), shape.dtype)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        if indexer_key_states.dim() != 3 or layer_idx in self.index:
            raise UnsupportedByRoute(INDEX)
        self.index[layer_idx] = IndexShape(int(indexer_key_states.shape[2]), indexer_key_states.dtype)
        return indexer_key_states

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0
