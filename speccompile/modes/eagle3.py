"""EAGLE-3: a head of about one layer reads the target's hidden states and drafts.

After Li et al., "EAGLE-3" (2025). The head is captured as the target is and copied into the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from transformers import PreTrainedModel

from speccompile.errors import InvalidHead, InvalidOption
from speccompile.graph_capture.support import ModelInfo, decoder_layers
from speccompile.heads import Eagle3Head, default_taps, load_eagle3
from speccompile.heads.config_files import check_target
from speccompile.heads.network import Eagle3Network
from speccompile.modes.base import Mode
from speccompile.passes.base import Facts, Pass, facts
from speccompile.passes.eagle3 import DraftByHead, KeepHeadWarm
from speccompile.passes.split import StoreDrafts
from speccompile.passes.tap_hidden import LowerTaps, MarkTaps, Tap


@dataclass(frozen=True)
class Eagle3OneModel(Mode):
    """Drafts with an EAGLE-3 head inside of the step.

    Args:
        draft: an :class:`~speccompile.heads.Eagle3Head` in eval mode, in the target's dtype and on its device; or the
            folder or hub id of a published one.
        draft_max_len: most tokens of a text that it drafts for; rows behind are decoded without drafts. None is what
            the head was made for (``max_position_embeddings``).
    """

    draft: Any = None
    draft_max_len: int | None = None

    name: ClassVar[str] = "eagle3_one_model"
    draft_probs: ClassVar[bool] = True
    reads_hidden: ClassVar[bool] = True
    weights_from: ClassVar[Literal["nowhere", "drafter", "target"]] = "drafter"
    goals: ClassVar[Facts] = facts("drafter_read")

    def check(self, info: ModelInfo) -> None:
        if not isinstance(self.draft, Eagle3Head | str | Path) or self.draft == "":
            reason = "give an Eagle3Head, the folder of a published one, or its hub id"
            raise self._invalid("draft", type(self.draft).__name__ if self.draft is not None else None, reason)
        most = self.draft_max_len
        if not (most is None or (isinstance(most, int) and not isinstance(most, bool) and most >= 2)):
            raise self._invalid("draft_max_len", most, "it has to be an int of at least 2, or None")

    def _invalid(self, option: str, value: Any, reason: str) -> InvalidOption:
        return InvalidOption(where=f"mode {self.name!r}", name=option, value=value, reason=reason)

    def loaded(self, model: PreTrainedModel) -> Eagle3OneModel:
        if not isinstance(self.draft, Eagle3Head):
            return replace(self, draft=load_eagle3(self.draft, model))
        head = self.draft
        check_target(head.config, "that was given", model)
        weight = head.fc.weight
        if (weight.dtype, weight.device) != (model.dtype, model.device):
            reason = f"it is {weight.dtype} on {weight.device}, and the target {model.dtype} on {model.device}"
            raise InvalidHead(source="that was given", reason=f"{reason}; use head.to(model.device, model.dtype)")
        if head.training:
            raise InvalidHead(source="that was given", reason="it is in training mode; call head.eval()")
        if not head.config.taps:
            taps = default_taps(len(decoder_layers(model)[1]))
            head = head.with_taps(taps)
        return replace(self, draft=head)

    def network(self, model: PreTrainedModel, info: ModelInfo, max_len: int) -> Eagle3Network:
        most = self.draft_max_len or self.draft.config.max_position_embeddings
        return Eagle3Network(self.draft, info, min(most, max_len))

    def draft_passes(self, draft_len: int) -> list[Pass]:
        return [DraftByHead(draft_len)]

    def sampled_draft_passes(self, draft_len: int, *, probabilities: bool) -> list[Pass]:
        return [DraftByHead(draft_len, draws=True, probabilities=probabilities)]

    def commit_passes(self) -> list[Pass]:
        taps = tuple(Tap(layer) for layer in self.draft.config.taps)
        return [MarkTaps(taps), LowerTaps(), KeepHeadWarm()]

    def explain(self) -> str:
        if not isinstance(self.draft, Eagle3Head):
            return f"the EAGLE-3 head {self.draft} drafts"
        config = self.draft.config
        part = (
            ""
            if config.draft_vocab_size == config.vocab_size
            else f", {config.draft_vocab_size} tokens of the vocabulary"
        )
        return f"an EAGLE-3 head over the outputs of layers {', '.join(map(str, config.taps))} drafts{part}"


@dataclass(frozen=True)
class Eagle3(Eagle3OneModel):
    """The same with drafting in executables of its own, which run in front of the step. Keeping the head warm stays
    part of the target's executables, where the hidden states are.

    Args:
        fused: True drafts inside of the step, as ``eagle3_one_model`` does.
    """

    fused: bool = False

    name: ClassVar[str] = "eagle3"
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

    def drafter_chunk_passes(self, width: int) -> list[Pass]:
        return []
