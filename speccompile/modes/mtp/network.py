"""MTP modules as a drafter: their state in the arena."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from speccompile.graph.layer_state import kv_state
from speccompile.graph.state import Layout, N, StateSpec, resolve_layout
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.mtp.head import MtpHead
from speccompile.modes.network.head_network import NEWEST_ROW, HeadNetwork
from speccompile.utils.weight_forms import WeightForm

#: The input of a module at committed tokens. ``module``: the output of the module before, as in the paper and
#: transformers. ``target``: the target's own hidden states, as in TensorRT-LLM's ``MTPWorker``. At draft tokens the
#: input is always the output of the module before.
Chain = Literal["module", "target"]

#: State ``[N]``: the first position of a slot's sequence that was read. The KV of the rows before it was known already.
READ_FROM = "read_from"


class MtpNetwork(HeadNetwork):
    """MTP modules as a drafter.

    Args:
        head: the modules; target: the target that they draft for.
        max_len: the largest number of tokens of a sequence that they draft for.
        chain: see :data:`Chain`; None if one module drafts all tokens.
        weights: the form of their linears' weights.
    """

    head: MtpHead

    def __init__(
        self,
        head: MtpHead,
        target: ModelInfo,
        max_len: int,
        chain: Chain | None = None,
        weights: WeightForm = "same",
    ) -> None:
        info = replace(target, name=type(head).__name__, num_layers=len(head.layers))
        super().__init__(head, info, max_len, weights)
        self.chain = chain

    def layout(self, target: Layout) -> Layout:
        modules, hidden = len(self.head.layers), self.info.hidden_size
        own: list[StateSpec] = []
        # Row i of module k reads the token at position i + k + 1. In a chain of modules, row i - k is computed together
        # with position i, from the output of the module before. After a known beginning of a sequence these rows are
        # computed again, with all of their inputs.
        ahead = modules if self.chain == "module" else 1
        if self.chain is None:
            own.append(StateSpec(NEWEST_ROW, (N, hidden), self.info.dtype))
        else:
            own.append(StateSpec(NEWEST_ROW, (N, modules if self.chain == "module" else 1, hidden), self.info.dtype))
        if self.chain == "module":
            own.append(StateSpec(READ_FROM, (N,), torch.int64, fill=-1, low=-1))
        kv = [replace(spec, looks_ahead=ahead) for spec in kv_state(self.kv)]
        return resolve_layout(
            [*kv, *own],
            max_batch=target.max_batch,
            max_len=self.max_len,
            max_draft_len=target.max_draft_len,
            max_width=target.max_width,
            vocab_size=self.info.vocab_size,
        )
