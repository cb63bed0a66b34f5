"""An EAGLE-3 head that was trained to draft all tokens at once (P-EAGLE).

Source: Hui et al., "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training" (2026, arXiv 2602.01469), and vLLM. The
rows after the newest one read a mask token, and a learned vector instead of the target's hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.splicing import splice_graph
from speccompile.graph.step_graph import StepGraph
from speccompile.modes.network.draft_at_once import DraftAtOnce, with_masks
from speccompile.modes.network.head_passes import chooses_in_part, newest_rows, target_ids_of
from speccompile.modes.network.passes import drafter_of, forward_drafter
from speccompile.passes.step.draft_chain import one_after_another


@dataclass(frozen=True)
class DraftByMaskedHead(DraftAtOnce):
    """Draft all tokens from one forward of the rows after the newest one. The first draft comes from the newest row's
    stored output."""

    mask_token_id: int = field(kw_only=True)

    name: ClassVar[str] = "draft_by_masked_head"
    looks_for: ClassVar[str] = "the mode's head"

    def logits(self, graph: StepGraph, token: fx.Node, position: fx.Node) -> fx.Node:
        head, slots, start = drafter_of(graph), graph.values["slots"], graph.anchors.start
        hidden = newest_rows(graph, slots, start)
        sizes = {"count": self.draft_len - 1, "mask_token_id": self.mask_token_id}
        tokens, positions = graph.insert(with_masks, token, position, before=start, **sizes)
        if self.draft_len > 1:
            (fused,) = splice_graph(graph, head, {}, [head.values["mask_fused"]], start)
            masks, rows, fused = graph.insert(masked_rows, tokens, positions, fused, before=start)
            given, outputs = {"fused": fused}, ("hidden",)
            (masked,) = forward_drafter(graph, masks, rows, slots, before=start, outputs=outputs, given=given)
            hidden = graph.insert(one_after_another, hidden, masked, before=start)
        whole = "target_logits" in head.values and not chooses_in_part(head, draws=self.draws)
        given, outputs = {"hidden": hidden}, ("target_logits" if whole else "logits",)
        (logits,) = forward_drafter(graph, tokens, positions, slots, before=start, outputs=outputs, given=given)
        return logits

    def token_ids(self, graph: StepGraph) -> fx.Node | None:
        return target_ids_of(graph, draws=self.draws)

    def what(self, graph: StepGraph) -> str:
        return f"one forward of {len(drafter_of(graph).anchors.layers)} layers over {self.draft_len - 1} mask tokens"


def masked_rows(
    tokens: torch.Tensor, positions: torch.Tensor, fused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask tokens ``[B, K - 1]``, the positions of their rows ``[B, K - 1]``, and ``fused`` repeated for each, ``[B, K
    - 1, H]``.

    Args:
        tokens, positions: ``[B, K]``, of the newest token and the mask tokens.
        fused: ``[1, 1, H]``.
    """
    masks = tokens[:, 1:].contiguous()
    # A row reads the token at the position after its own.
    return masks, positions[:, :-1].contiguous(), fused.expand(*masks.shape, -1).contiguous()
