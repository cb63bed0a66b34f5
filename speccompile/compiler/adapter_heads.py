"""The draft head of an adapter, as values of state tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.adapters.head import read_head, unchanged
from speccompile.compiler.config import BuildConfig
from speccompile.errors import InvalidOption
from speccompile.graph_capture.model_info import ModelInfo


def head_values(
    name: str, source: Any, config: BuildConfig, info: ModelInfo, model: PreTrainedModel
) -> dict[str, torch.Tensor]:
    """The values of the state tensors of an adapter's head, by name; nothing without memory for heads.

    Args:
        name: of the adapter.
        source: its head, as :func:`~speccompile.adapters.head.read_head` accepts it; None is the shared head.

    Raises:
        InvalidOption: a head is given, and the model was wrapped without memory for heads.
        InvalidAdapter: the head is not the shared one with other weights, or its difference exceeds the buffers.
        UserError: its checkpoint cannot be read.
    """
    buffers, shared = config.head_adapters, config.mode.adaptable_head
    if buffers is None or shared is None:
        if source is None:
            return {}
        reason = "the model was wrapped without memory for heads; wrap it with Adapters(..., head_rank=...)"
        raise InvalidOption(where="add_adapter", name="head", value=source, reason=reason)

    def load(given: Any) -> nn.Module:
        mode = config.mode.with_head(given)
        mode.check(info)
        head = mode.loaded(model).adaptable_head
        assert head is not None
        return head

    change = unchanged(buffers, shared) if source is None else read_head(name, source, buffers, shared, load)
    vectors = {vector.state: change.vectors[vector.path] for vector in buffers.vectors}
    return buffers.packed(change.pairs) | vectors
