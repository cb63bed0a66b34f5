"""EAGLE-1 and EAGLE-2: a head of one layer reads the target's last hidden state and drafts.

Source: Li et al., "EAGLE" (2024) and "EAGLE-2" (2024). The two have one head: EAGLE-2 drafts dynamic trees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedModel

from speccompile.errors import InvalidHead
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.eagle.checkpoints import load_eagle
from speccompile.modes.eagle.config import check_target
from speccompile.modes.eagle.head import EagleHead
from speccompile.modes.network.head_mode import RecurrentHead
from speccompile.modes.network.row_network import RowNetwork
from speccompile.passes.step.tap_hidden import Tap


@dataclass(frozen=True)
class Eagle(RecurrentHead):
    """Drafts with an EAGLE-1 or EAGLE-2 head.

    Args:
        draft: an :class:`~speccompile.heads.EagleHead` in eval mode, in the target's dtype and on its device; or the
            folder or hub id of a published one.
        draft_max_len: the largest number of tokens of a sequence that the head drafts for. Longer sequences are decoded
            without drafts. None is the head's ``max_position_embeddings``.
        draft_weights: the form of its linears, ``"auto"`` by default; see
            :class:`~speccompile.modes.network.network_mode.NetworkMode`.
        fused: draft inside of the step. False runs separate executables of the drafter before the target's.
    """

    fused: bool = True

    name: ClassVar[str] = "eagle"

    def check(self, info: ModelInfo) -> None:
        if not isinstance(self.draft, EagleHead | str | Path) or self.draft == "":
            reason = "give an EagleHead, the folder of a published one, or its hub id"
            raise self.invalid("draft", type(self.draft).__name__ if self.draft is not None else None, reason)
        super().check(info)

    def loaded(self, model: PreTrainedModel) -> Eagle:
        if not isinstance(self.draft, EagleHead):
            return replace(self, draft=load_eagle(self.draft, model))
        head = self.draft
        check_target(head.config, "that was given", model)
        weight = head.fc.weight
        if (weight.dtype, weight.device) != (model.dtype, model.device):
            reason = f"it must be {model.dtype} on {model.device}, as the target, got {weight.dtype} on {weight.device}"
            raise InvalidHead(source="that was given", reason=f"{reason}; use head.to(model.device, model.dtype)")
        if head.training:
            raise InvalidHead(source="that was given", reason="it is in training mode; call head.eval()")
        return self

    def network(self, model: PreTrainedModel, info: ModelInfo, max_len: int) -> RowNetwork:
        longest = min(self.draft_max_len or self.draft.config.max_position_embeddings, max_len)
        return RowNetwork(self.draft, info, self.draft.config.hidden_size, longest, self.draft_form)

    @property
    def taps(self) -> tuple[Tap, ...]:
        return (Tap(-1, post_norm=True),)

    def explain(self) -> str:
        if not isinstance(self.draft, EagleHead):
            return f"the EAGLE head {self.draft} drafts"
        return "an EAGLE head over the target's last hidden state drafts"
