"""The arena's layout of a small hybrid model, without a model."""

from __future__ import annotations

import torch

from speccompile.graph.layer_state import KVShape, RecurrentShape, kv_state, recurrent_state
from speccompile.graph.state import Layout, core_state, resolve_layout

#: Bytes of one slot: states of two layers, and what is kept beside them in steps of 4 tokens.
STATE, KEPT = 2 * 4 * (2 * 3 * 5), 2 * 4 * (4 * 23 + 7 * 11)
KV_OF_A_TOKEN = 4 * (2 * 8 + 2 * 6)


def recurrent_layout() -> Layout:
    """Two recurrent layers with a convolution each, and one with KV; three slots with the dummy."""
    recurrent = {}
    for layer in (0, 1):
        recurrent[f"conv_{layer}"] = RecurrentShape((), 11, 3)
        recurrent[f"delta_{layer}"] = RecurrentShape((2, 3, 5), 23)
    specs = [
        *core_state(64),
        *kv_state({2: KVShape((2, 8), (2, 6), torch.float32)}),
        *recurrent_state(recurrent),
    ]
    return resolve_layout(specs, max_batch=2, max_len=20, max_draft_len=3, max_width=4, vocab_size=64)
