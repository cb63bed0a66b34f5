"""A head that reads its own output as a drafter (EAGLE, EAGLE-3): its state in the arena."""

from __future__ import annotations

from dataclasses import replace

from speccompile.graph.layer_state import kv_state
from speccompile.graph.state import Layout, N, StateSpec, resolve_layout
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.network.draft_head import DraftHead
from speccompile.modes.network.head_network import NEWEST_ROW, HeadNetwork
from speccompile.utils.weight_forms import WeightForm


class RowNetwork(HeadNetwork):
    """A head whose row i reads the target's hidden states at position i and the token at position i + 1.

    Args:
        hidden_size: H, the size of the output of its layers.
        max_len: the largest number of tokens of a sequence that it drafts for.
        weights: the form of its linears' weights.
    """

    def __init__(
        self, head: DraftHead, target: ModelInfo, hidden_size: int, max_len: int, weights: WeightForm = "same"
    ) -> None:
        # The head reads tokens of the target's vocabulary.
        info = replace(target, name=type(head).__name__, num_layers=len(head.layers), hidden_size=hidden_size)
        super().__init__(head, info, max_len, weights)

    @property
    def windows_stay(self) -> bool:
        return True

    def layout(self, target: Layout) -> Layout:
        # Row i of the head reads the token at position i + 1.
        kv = [replace(spec, looks_ahead=1) for spec in kv_state(self.kv)]
        newest = StateSpec(NEWEST_ROW, (N, self.info.hidden_size), self.info.dtype)
        return resolve_layout(
            [*kv, newest],
            max_batch=target.max_batch,
            max_len=self.max_len,
            max_draft_len=target.max_draft_len,
            max_width=target.max_width,
            vocab_size=self.info.vocab_size,
        )
