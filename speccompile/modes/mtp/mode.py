"""MTP: the target's own multi-token prediction modules draft. Module k drafts the k-th token.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024); TensorRT-LLM's ``MTP`` (``MTPWorker`` in
``_torch/speculative/mtp.py``); and transformers' ``generate(use_mtp=True)``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, get_args

from transformers import PreTrainedModel

from speccompile.errors import InvalidHead
from speccompile.graph.step_form import StepForm
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.mtp.checkpoints import load_mtp
from speccompile.modes.mtp.head import MtpHead
from speccompile.modes.mtp.network import Chain, MtpNetwork
from speccompile.modes.mtp.passes import DraftByModules, KeepModulesWarm
from speccompile.modes.network.head_mode import HeadMode
from speccompile.passes.base import Pass
from speccompile.passes.step.tap_hidden import Tap


@dataclass(frozen=True)
class MtpMode(HeadMode):
    """The base class of modes with MTP modules.

    Args:
        draft: an :class:`~speccompile.heads.MtpHead` for this target; or the folder or hub id of a checkpoint with such
            modules. None is the target's own checkpoint (``model.config.name_or_path``).
        draft_max_len: the largest number of tokens of a sequence that the modules draft for. Longer sequences are
            decoded without drafts. None is ``max_len``.
        draft_weights: the form of their linears, ``"auto"`` by default; see
            :class:`~speccompile.modes.network.network_mode.NetworkMode`.
    """

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The output of the target's last layer."""
        return (Tap(-1),)

    def check(self, info: ModelInfo) -> None:
        if not isinstance(self.draft, MtpHead | str | Path | None) or self.draft == "":
            reason = "give an MtpHead, the folder of a checkpoint with MTP modules, its hub id, or None"
            raise self.invalid("draft", type(self.draft).__name__, reason)
        super().check(info)

    def loaded(self, model: PreTrainedModel) -> MtpMode:
        head = self.draft if isinstance(self.draft, MtpHead) else load_mtp(self.draft, model)
        if head.lm_head is not model.get_output_embeddings():
            reason = "they share modules of another target; create them for this one"
            raise InvalidHead(source="of MTP modules that was given", reason=reason)
        return replace(self, draft=head)


@dataclass(frozen=True)
class Mtp(MtpMode):
    """Drafts with one module for each draft token, inside of the step. K is at most the number of modules.

    Args:
        chain: the input of a module at committed tokens. ``module``: the output of the module before, as in training.
            ``target``: the target's own hidden states, as in TensorRT-LLM.
    """

    chain: Chain = "module"

    name: ClassVar[str] = "mtp"

    def check(self, info: ModelInfo) -> None:
        super().check(info)
        if self.chain not in get_args(Chain):
            raise self.invalid("chain", self.chain, f"choose from {', '.join(get_args(Chain))}")

    @property
    def most_drafts(self) -> int | None:
        return len(self.draft.layers) if isinstance(self.draft, MtpHead) else None

    def network(self, model: PreTrainedModel, info: ModelInfo, max_len: int) -> MtpNetwork:
        return MtpNetwork(self.draft, info, max_len, self.chain, self.draft_form)

    def drafting(self, form: StepForm) -> list[Pass]:
        return [DraftByModules(*form.chain, chain=self.chain)]

    def after_commit(self, form: StepForm) -> list[Pass]:
        return [KeepModulesWarm(self.chain)]

    def explain(self) -> str:
        if not isinstance(self.draft, MtpHead):
            return f"the MTP modules of {self.draft or 'the target'} draft"
        modules, reads = len(self.draft.layers), "the one before" if self.chain == "module" else "the target"
        return f"{modules} MTP modules draft, each one token, reading what {reads} left"
