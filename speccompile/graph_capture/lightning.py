"""MiniMax's lightning attention, captured as a scan. Its layers keep their state by their own interface.

Its state ``S = exp(-slope) * S + k v`` is that of a Mamba-2 layer with time steps of 1. Sources:
``MiniMaxLightningAttention`` (transformers, ``models/minimax/modeling_minimax.py``); Qin et al., "Lightning
Attention-2" (2024).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from speccompile.graph.layer_state import RecurrentShape
from speccompile.graph_capture.attention import current_run
from speccompile.graph_capture.cache import RecordingCache, SlotCache

ops = torch.ops.speccompile


@contextlib.contextmanager
def lightning_captured(model: nn.Module) -> Iterator[None]:
    """Let the lightning layers of ``model`` keep their state in the package's cache in this context. No other code may
    run ``model``."""
    layers = lightning_layers(model)
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def lightning_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of transformers' own class."""
    return [
        module
        for module in model.modules()
        if type(module).__name__ == "MiniMaxLightningAttention"
        and type(module).__module__.startswith("transformers.models.")
    ]


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any = None,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    run = current_run()
    assert run is not None
    rows, width, _ = hidden_states.shape
    heads, dim = self.num_attention_heads, self.head_dim
    qkv = self.act_fn(self.qkv_proj(hidden_states)).reshape(rows, width, heads, 3 * dim)
    query, key, value = (item.float() for item in torch.split(qkv, dim, dim=3))
    name = f"scan_{self.layer_idx}"
    if isinstance(run.cache, RecordingCache):
        run.cache.note(name, RecurrentShape((heads, dim, dim), heads * (2 * dim + 1)))
        result: tuple[torch.Tensor, None] = type(self).forward(self, hidden_states, position_embeddings, None)
        return result
    assert isinstance(run.cache, SlotCache)
    step = run.cache.recurrent
    out = ops.selective_scan_(
        value,
        value.new_ones((rows, width, heads)),
        -self.slope_rate.float().reshape(heads, 1),
        key,
        query,
        step.tensors[name],
        step.tensors[f"{name}_kept"],
        run.cache.slots,
        run.cache.positions,
        step.absorbed,
        step.settled,
    )
    out = self.norm(out.reshape(rows, width, heads * dim).to(hidden_states.dtype))
    return self.out_proj(F.sigmoid(self.output_gate(hidden_states)) * out), None
