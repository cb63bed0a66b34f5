"""A DFlash head as a drafter: its state in the arena."""

from __future__ import annotations

from dataclasses import replace

from speccompile.graph.layer_state import kv_state
from speccompile.graph.state import Layout, resolve_layout
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.dflash.head import DFlashHead
from speccompile.modes.network.head_network import HeadNetwork
from speccompile.utils.weight_forms import WeightForm


class DFlashNetwork(HeadNetwork):
    """A DFlash head as a drafter.

    Args:
        max_len: the largest number of tokens of a sequence that it drafts for.
        weights: the form of its linears' weights.
    """

    head: DFlashHead

    def __init__(self, head: DFlashHead, target: ModelInfo, max_len: int, weights: WeightForm = "same") -> None:
        info = replace(target, name="DFlashHead", num_layers=len(head.layers))
        super().__init__(head, info, max_len, weights)

    def layout(self, target: Layout) -> Layout:
        return resolve_layout(
            kv_state(self.kv),
            max_batch=target.max_batch,
            max_len=self.max_len,
            max_draft_len=target.max_draft_len,
            # Every tier writes the whole block.
            max_width=max(target.max_width, self.head.config.block_size),
            vocab_size=self.info.vocab_size,
        )
