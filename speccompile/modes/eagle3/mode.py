"""EAGLE-3: a head, usually of one layer, reads the target's hidden states and drafts.

Source: Li et al., "EAGLE-3" (2025). The head is captured in the same way as the target, and copied into the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedModel

from speccompile.errors import InvalidHead
from speccompile.graph.step_form import StepForm
from speccompile.graph_capture.model_info import ModelInfo, decoder_layers
from speccompile.modes.eagle3.checkpoints import load_eagle3
from speccompile.modes.eagle3.config import EMBEDDING
from speccompile.modes.eagle3.config_files import check_target
from speccompile.modes.eagle3.head import Eagle3Head
from speccompile.modes.eagle3.parallel import DraftByMaskedHead
from speccompile.modes.network.head_mode import RecurrentHead
from speccompile.modes.network.row_network import RowNetwork
from speccompile.passes.base import Pass
from speccompile.passes.step.tap_hidden import Tap, default_taps


@dataclass(frozen=True)
class Eagle3(RecurrentHead):
    """Drafts with an EAGLE-3 head, in separate executables before the step's.

    Args:
        draft: an :class:`~speccompile.heads.Eagle3Head` in eval mode, in the target's dtype and on its device; or the
            folder or hub id of a published one.
        draft_max_len: the largest number of tokens of a sequence that the head drafts for. Longer sequences are decoded
            without drafts. None is the head's ``max_position_embeddings``.
        draft_weights: the form of its linears, ``"auto"`` by default; see
            :class:`~speccompile.modes.network.network_mode.NetworkMode`.
        fused: True drafts inside of the step.
    """

    name: ClassVar[str] = "eagle3"

    def check(self, info: ModelInfo) -> None:
        if not isinstance(self.draft, Eagle3Head | str | Path) or self.draft == "":
            reason = "give an Eagle3Head, the folder of a published one, or its hub id"
            raise self.invalid("draft", type(self.draft).__name__ if self.draft is not None else None, reason)
        super().check(info)

    def loaded(self, model: PreTrainedModel) -> Eagle3:
        if not isinstance(self.draft, Eagle3Head):
            return replace(self, draft=load_eagle3(self.draft, model))
        head = self.draft
        check_target(head.config, "that was given", model)
        weight = head.fc.weight
        if (weight.dtype, weight.device) != (model.dtype, model.device):
            reason = f"it must be {model.dtype} on {model.device}, as the target, got {weight.dtype} on {weight.device}"
            raise InvalidHead(source="that was given", reason=f"{reason}; use head.to(model.device, model.dtype)")
        if head.training:
            raise InvalidHead(source="that was given", reason="it is in training mode; call head.eval()")
        if not head.config.taps:
            taps = default_taps(len(decoder_layers(model)[1]))
            head = head.with_taps(taps)
        return replace(self, draft=head)

    def network(self, model: PreTrainedModel, info: ModelInfo, max_len: int) -> RowNetwork:
        most = self.draft_max_len or self.draft.config.max_position_embeddings
        longest = min(most, max_len)
        head = self.draft.for_texts(longest)
        return RowNetwork(head, info, head.config.hidden_size, longest, self.draft_form)

    @property
    def one_forward(self) -> bool:  # type: ignore[override]
        return isinstance(self.draft, Eagle3Head) and self.draft.config.mask_token_id is not None

    def chain(self, form: StepForm) -> Pass:
        mask = self.draft.config.mask_token_id
        return super().chain(form) if mask is None else DraftByMaskedHead(*form.chain, mask_token_id=mask)

    @property
    def taps(self) -> tuple[Tap, ...]:
        return tuple(Tap(0, before=True) if tap == EMBEDDING else Tap(tap) for tap in self.draft.config.taps)

    @property
    def learns_from(self) -> tuple[int, ...] | None:
        if not isinstance(self.draft, Eagle3Head):
            return None
        return self.draft.config.taps if self.draft.config.trainable else None

    def explain(self) -> str:
        if not isinstance(self.draft, Eagle3Head):
            return f"the EAGLE-3 head {self.draft} drafts"
        config = self.draft.config
        part = (
            ""
            if config.draft_vocab_size == config.vocab_size
            else f", {config.draft_vocab_size} tokens of the vocabulary"
        )
        layers = ", ".join(str(tap) for tap in config.taps if tap != EMBEDDING)
        reads = f"the embedding and the outputs of layers {layers}" if EMBEDDING in config.taps else ""
        at_once = " all tokens at once" if self.one_forward else ""
        return f"an EAGLE-3 head over {reads or f'the outputs of layers {layers}'} drafts{at_once}{part}"


@dataclass(frozen=True)
class Eagle3OneModel(Eagle3):
    """Drafts with an EAGLE-3 head inside of the step, like TensorRT-LLM's mode of this name."""

    fused: bool = True

    name: ClassVar[str] = "eagle3_one_model"
