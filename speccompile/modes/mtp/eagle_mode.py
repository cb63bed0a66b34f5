"""MTP as EAGLE: the target's first multi-token prediction (MTP) module drafts every token.

These are TensorRT-LLM's ``MTP_EAGLE`` and ``MTP_EAGLE_ONE_MODEL`` (``MTPEagleWorker`` in
``_torch/speculative/mtp.py``), and SGLang's ``NEXTN``. A row of the module has the inputs of an EAGLE head's row, so
the passes are those of EAGLE-3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from transformers import PreTrainedModel

from speccompile.graph_capture.masks import Mask
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.mtp.head import MtpHead
from speccompile.modes.mtp.mode import MtpMode
from speccompile.modes.mtp.network import MtpNetwork
from speccompile.modes.network.head_mode import RecurrentHead


@dataclass(frozen=True)
class MtpEagle(MtpMode, RecurrentHead):
    """Drafts with the first module, in separate executables before the step's. From the second draft token on, the
    module reads its own output.

    Args:
        fused: True drafts inside of the step.
    """

    name: ClassVar[str] = "mtp_eagle"

    def loaded(self, model: PreTrainedModel) -> MtpEagle:
        mode = super().loaded(model)
        return replace(self, draft=mode.draft.first())

    def network(self, model: PreTrainedModel, info: ModelInfo, max_len: int) -> MtpNetwork:
        return MtpNetwork(self.draft, info, max_len, weights=self.draft_form)

    @property
    def learns_from(self) -> tuple[int, ...] | None:
        # Training does not support a layer that attends within a window.
        trainable = isinstance(self.draft, MtpHead) and self.draft.masks[0] == Mask()
        return (self.draft.last_layer,) if trainable else None

    def explain(self) -> str:
        if not isinstance(self.draft, MtpHead):
            return f"the first MTP module of {self.draft or 'the target'} drafts"
        return "an MTP module drafts, reading what the target's last layer left and then its own output"


@dataclass(frozen=True)
class MtpEagleOneModel(MtpEagle):
    """Drafts with the first module inside of the step, like TensorRT-LLM's mode of this name."""

    fused: bool = True

    name: ClassVar[str] = "mtp_eagle_one_model"
