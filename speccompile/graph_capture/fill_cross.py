"""Keys and values of an encoder's output, written into the state of a slot."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from speccompile.graph.arena import Arena
from speccompile.graph.layer_state import SOURCE_LENGTH, cross_names
from speccompile.graph_capture.encoder_decoder import EncoderOutput, decode
from speccompile.utils.transformers_version import cache_argument


def fill_cross(model: PreTrainedModel, arena: Arena, slot: int, source: EncoderOutput) -> None:
    """Write what the layers attend to in ``source``, of one row, into the state of ``slot``.

    The model's own decoder computes it, in a forward of one token.
    """
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    first = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with torch.no_grad():
        decode(model, source, input_ids=first, use_cache=True, **{cache_argument(model): cache})
    cross: Any = cache.cross_attention_cache
    for layer, of_layer in enumerate(cross.layers):
        (key,), (value,) = cross_names([layer])
        # An encoder's layers have no state of this kind.
        if key in arena:
            arena.write(key, slot, of_layer.keys[0].transpose(0, 1))
            arena.write(value, slot, of_layer.values[0].transpose(0, 1))
    arena.write(SOURCE_LENGTH, slot, source.states.shape[1])
