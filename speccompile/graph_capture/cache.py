"""The arena as a transformers cache: ``Cache`` subclasses that replace the model's cache during capture."""

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
from speccompile.ops.kv_rows import features_of, from_rows, to_rows
from speccompile.utils.transformers_version import ASKS_FOR_STATE

INDEX = "chooses the keys to attend to by an index of another kind than DeepSeek-V3.2's"
RECURRENT = "keeps a recurrent or linear-attention state of a kind that is not captured yet"


class StepCache(Cache):
    """Base of both caches, with the answers to a model's queries. Positions are inputs, and there is no single length.
    A recurrent layer has no state before this forward, so it computes its form for many tokens.

    Args:
        length: the length that the cache reports. A model that reads it counts positions itself.
    """

    def __init__(self, length: int = 0) -> None:
        super().__init__(layers=[])
        self.length = length
        # Results of ``update``. Attention over other tensors means that the model changed them.
        self.returned: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Results of ``update_conv_state`` that no convolution has read yet, by the name of their state.
        self._unread: dict[str, torch.Tensor] = {}
        # The newest layer that requested a state, and its number of recurrences.
        self._layer = -1
        self._recurrences = 0
        # The layer of the newest keys and values.
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
        """Return the inputs of a layer's convolution, ``[B, C, T]``, unchanged. The op reads earlier inputs."""
        name = f"conv_{layer_idx}" if state_idx == 0 else f"conv_{layer_idx}_{state_idx}"
        self._unread[name] = conv_states
        if not ASKS_FOR_STATE:
            # In these versions every recurrence follows a convolution of its layer.
            self._begin_recurrences(layer_idx)
        return conv_states

    def conv_of(self, inputs: torch.Tensor) -> str:
        """Return the state of the convolution that reads ``inputs``, a result of :meth:`update_conv_state`."""
        found = [name for name, given in self._unread.items() if given is inputs]
        if not found:
            raise UnsupportedByRoute("convolves other inputs than it put into the cache")
        del self._unread[found[0]]
        return found[0]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._begin_recurrences(layer_idx)

    def _begin_recurrences(self, layer_idx: int) -> None:
        self._layer, self._recurrences = layer_idx, 0

    def recurrence(self, kind: str) -> str:
        """Return the state of the next recurrence of the layer that requested one. A layer may have several."""
        if self._layer < 0:
            raise UnsupportedByRoute(RECURRENT)
        self._recurrences += 1
        name = f"{kind}_{self._layer}"
        return name if self._recurrences == 1 else f"{name}_{self._recurrences - 1}"

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> torch.Tensor:
        """Return the state, which the op has written. A recurrence without the package's op has no state."""
        if layer_idx != self._layer or self._recurrences == 0:
            raise UnsupportedByRoute(RECURRENT)
        self._layer = -1
        return recurrent_states

    def check_read(self) -> None:
        """Check that a convolution of the package has read all inputs that a layer keeps.

        Raises:
            UnsupportedByRoute: it has not.
        """
        if self._unread:
            raise UnsupportedByRoute(f"{RECURRENT} ({', '.join(self._unread)})")

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


@dataclass(frozen=True)
class Recurrent:
    """The state of recurrent layers in a step, and the position of each row's state. See
    :mod:`speccompile.ops.recurrence`.

    Args:
        tensors: state tensors of the arena, by name.
        absorbed, settled: int64 ``[B]``.
        prompt: int64 ``[B]``, the number of prompt tokens of each row.
    """

    tensors: Mapping[str, torch.Tensor]
    absorbed: torch.Tensor
    settled: torch.Tensor
    prompt: torch.Tensor


class SlotCache(StepCache):
    """A cache that writes to ``(slots, positions)``.

    Args:
        keys, values: by layer, ``[N, S, G, D]`` and ``[N, S, G, Dv]``.
        slots: int64 ``[B]``.
        positions: int64 ``[B, T]``, each row's own positions.
        gather: whether a layer only receives the KV of its rows, ``[B, G, S, D]``, as transformers' own attention
            needs it. Otherwise it receives the whole tensors, for the attention op.
        recurrent: state of recurrent layers; None without any.
        index: keys ``[N, S, size]`` of layers that choose by an index which tokens they attend to.
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
            UnsupportedByRoute: this capture has no recurrent state.
        """
        if self._recurrent is None:
            raise UnsupportedByRoute(RECURRENT)
        return self._recurrent

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        where = (self.slots.unsqueeze(1), self.positions)
        key, value = self.keys[layer_idx], self.values[layer_idx]
        given = key_states, value_states
        if self._keeps_latents(layer_idx, key_states):
            key_states, value_states = cached_latents(*given)
        key.index_put_(where, to_rows(key_states.transpose(1, 2), key.dtype))
        value.index_put_(where, to_rows(value_states.transpose(1, 2), value.dtype))
        if self.gather:
            # Contiguous, as in transformers' own cache: some models create a view of the result.
            rows = (cache[self.slots].transpose(1, 2).contiguous() for cache in (key, value))
            key, value = (from_rows(cached, given[0].dtype) for cached in rows)
            return key, value
        self.newest = layer_idx
        if self._keeps_latents(layer_idx, given[0]):
            # The expanded keys and values are not used: the attention op reads the latents.
            return given
        self.returned.append((key, value))
        return key, value

    def _keeps_latents(self, layer_idx: int, latent: torch.Tensor) -> bool:
        """Whether ``latent`` is cached together with its rotary key."""
        return features_of(self.keys[layer_idx]) != latent.shape[-1]

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write index keys ``[B, T, size]``. Return the keys of all positions of the rows, ``[B, S, size]``."""
        if layer_idx not in self.index:
            raise UnsupportedByRoute(INDEX)
        keys = self.index[layer_idx]
        keys.index_put_((self.slots.unsqueeze(1), self.positions), indexer_key_states)
        return keys[self.slots]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return next(iter(self.keys.values())).shape[1], 0


class RecordingCache(StepCache):
    """A cache that returns keys and values unchanged and records their sizes. Shapes of state are observed, not
    computed."""

    def __init__(self, length: int = 0) -> None:
        super().__init__(length)
        self.observed: dict[int, KVShape] = {}
        self.recurrent: dict[str, RecurrentShape] = {}
        self.index: dict[int, IndexShape] = {}

    def note(self, name: str, shape: RecurrentShape) -> None:
        """Record the state of a recurrence.

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
        """Cache the latents of the newest layer, which attends to them, in the form of :func:`cached_latents`.

        Raises:
            UnsupportedByRoute: the layer has several latents for each token.
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
