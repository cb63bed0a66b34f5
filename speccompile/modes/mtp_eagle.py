"""MTP as EAGLE: the target's first multi-token prediction module is used again for every draft token.

TensorRT-LLM's ``MTP_EAGLE`` and ``MTP_EAGLE_ONE_MODEL`` (``MTPEagleWorker`` in ``_torch/speculative/mtp.py``), SGLang's
``NEXTN``. A module's row is an EAGLE head's: the passes are EAGLE-3's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from transformers import PreTrainedModel

from speccompile.graph_capture.support import ModelInfo
from speccompile.heads.mtp import MtpHead
from speccompile.heads.mtp_network import MtpNetwork
from speccompile.modes.mtp import MtpMode
from speccompile.passes.base import Pass
from speccompile.passes.eagle3 import DraftByHead, KeepHeadWarm
from speccompile.passes.split import StoreDrafts
from speccompile.passes.tap_hidden import LowerTaps, MarkTaps


@dataclass(frozen=True)
class MtpEagleOneModel(MtpMode):
    """Drafts with the first module inside of the step: it reads its own output from the second draft token on."""

    name: ClassVar[str] = "mtp_eagle_one_model"

    def loaded(self, model: PreTrainedModel) -> MtpEagleOneModel:
        mode = super().loaded(model)
        return replace(self, draft=mode.draft.first())

    def network(self, model: PreTrainedModel, info: ModelInfo, max_len: int) -> MtpNetwork:
        return MtpNetwork(self.draft, info, self._max_len(max_len))

    def draft_passes(self, draft_len: int) -> list[Pass]:
        return [DraftByHead(draft_len)]

    def sampled_draft_passes(self, draft_len: int, *, probabilities: bool) -> list[Pass]:
        return [DraftByHead(draft_len, draws=True, probabilities=probabilities)]

    def commit_passes(self) -> list[Pass]:
        return [MarkTaps(self.taps), LowerTaps(), KeepHeadWarm()]

    def explain(self) -> str:
        if not isinstance(self.draft, MtpHead):
            return f"the first MTP module of {self.draft or 'the target'} drafts"
        return "an MTP module drafts, reading what the target's last layer left and then its own output"


@dataclass(frozen=True)
class MtpEagle(MtpEagleOneModel):
    """The same with drafting in executables of its own, which run in front of the step.

    Args:
        fused: True drafts inside of the step, as ``mtp_eagle_one_model`` does.
    """

    fused: bool = False

    name: ClassVar[str] = "mtp_eagle"
    splits: ClassVar[bool] = True

    @property
    def split(self) -> bool:
        return not self.fused

    def check(self, info: ModelInfo) -> None:
        super().check(info)
        if not isinstance(self.fused, bool):
            raise self._invalid("fused", self.fused, "use True or False")

    def drafter_passes(self, draft_len: int, *, draws: bool, probabilities: bool) -> list[Pass]:
        return [DraftByHead(draft_len, draws, probabilities), StoreDrafts(probabilities)] if draft_len else []
