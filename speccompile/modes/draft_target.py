"""A smaller causal language model with the same vocabulary drafts for the target.

Source: Leviathan et al. (2023) and Chen et al. (2023). The draft model is captured in the same way as the target, and
copied into the step. K forwards of one token draft. One more forward, over the tokens that the target reads, updates
the draft model's KV.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from transformers import PreTrainedModel

from speccompile.graph.step_form import StepForm
from speccompile.graph.tree import Tree
from speccompile.graph_capture.model_info import ModelInfo, inspect_model
from speccompile.graph_capture.rotary import check_rotary
from speccompile.modes.network.draft_at_once import DraftByMasks
from speccompile.modes.network.draft_model import DraftModel
from speccompile.modes.network.draft_models import check_same_vocabulary, draft_config, load_draft
from speccompile.modes.network.model_mode import DraftModelMode
from speccompile.modes.network.tree_at_once import DraftTreeAtOnce
from speccompile.passes.base import Pass
from speccompile.utils.numbers import is_int

SELF_INT8 = "self:int8"
#: Keys of a mask token in the config of a model that drafts all tokens at once: PARD's own, and vLLM's.
PARD_TOKENS = ("pard_token", "ptd_token_id")


@dataclass(frozen=True)
class DraftTarget(DraftModelMode):
    """Drafts with a separate language model.

    Args:
        draft: a transformers causal LM in eval mode on the target's device, a folder, or a hub id (loaded in the
            target's dtype); or ``"self:int8"``: the target itself with weights rounded to int8.
        draft_max_len: the largest number of tokens of a sequence that the model drafts for. Longer sequences are
            decoded without drafts. None is the draft model's ``max_position_embeddings``.
        draft_weights: the form of its linears, ``"auto"`` by default; see
            :class:`~speccompile.modes.network.network_mode.NetworkMode`.
        fused: draft inside of the step. False runs separate executables of the drafter before the target's.
        mask_token_id: for a draft model that was trained to draft all tokens in one forward (PARD): the token that is
            read at the position of each draft. None is the ``pard_token`` or ``ptd_token_id`` of the draft model's
            config. A model without either drafts one token after another.
    """

    fused: bool = True
    mask_token_id: int | None = None

    name: ClassVar[str] = "draft_target"
    reads_draft: ClassVar[bool] = True

    @property
    def rounded_by(self) -> str:  # type: ignore[override]
        return "draft" if self.draft == SELF_INT8 else "draft_weights"

    def check(self, info: ModelInfo) -> None:
        super().check(info)
        of_target = isinstance(self.draft, str) and self.draft.startswith("self:")
        named = self.draft == SELF_INT8 if of_target else self.draft != ""
        if not isinstance(self.draft, PreTrainedModel | str) or not named:
            reason = f"give a transformers model, a folder, a hub id or {SELF_INT8!r}"
            raise self.invalid("draft", self.draft, reason)

        mask = self.mask_token_id
        if not (mask is None or (is_int(mask) and 0 <= mask < info.vocab_size)):
            reason = f"it must be a token below {info.vocab_size}, or None"
            raise self.invalid("mask_token_id", mask, reason)

    def loaded(self, model: PreTrainedModel) -> DraftTarget:
        if self.mask_token_id is not None:
            return self
        config = draft_config(self.draft) if isinstance(self.draft, str) else self.draft.config.to_dict()
        key = next((key for key in PARD_TOKENS if config.get(key) is not None), None)
        if key is None:
            return self
        mode = replace(self, mask_token_id=config[key])
        mode.check(inspect_model(model))
        return mode

    def network(self, model: PreTrainedModel, info: ModelInfo, max_len: int) -> DraftModel:
        if self.draft == SELF_INT8:
            return DraftModel(model, info, self._own_len(model, max_len), "int8")
        draft = load_draft(self.draft, info) if isinstance(self.draft, str) else self.draft
        own = inspect_model(draft)
        if own.device != info.device:
            reason = (
                f"it must be on {info.device}, as the target, got {own.device}; "
                f"move it with draft.to({str(info.device)!r})"
            )
            raise self.invalid("draft", _shown(draft), reason)
        check_same_vocabulary(draft, own, model, info)
        if self.mask_token_id is not None and self.mask_token_id >= own.vocab_size:
            reason = f"it must be below {own.vocab_size}, the draft model's vocabulary"
            raise self.invalid("mask_token_id", self.mask_token_id, reason)
        length = self._own_len(draft, max_len)
        check_rotary(draft, length)
        return DraftModel(draft, own, length, self.draft_form)

    def _own_len(self, draft: PreTrainedModel, max_len: int) -> int:
        made_for = getattr(draft.config.get_text_config(decoder=True), "max_position_embeddings", None)
        known = [length for length in (self.draft_max_len or made_for, max_len) if isinstance(length, int)]
        return min(known)

    def chain(self, form: StepForm) -> Pass:
        mask = self.mask_token_id
        return super().chain(form) if mask is None else DraftByMasks(*form.chain, mask_token_id=mask)

    def tree(self, tree: Tree, form: StepForm) -> Pass:
        mask = self.mask_token_id
        if mask is None:
            return super().tree(tree, form)
        return DraftTreeAtOnce(tree, DraftByMasks(tree.depth, form.draws, form.probabilities, mask_token_id=mask))

    @property
    def one_forward(self) -> bool:  # type: ignore[override]
        return self.mask_token_id is not None

    def explain(self) -> str:
        who = "the target with weights rounded to int8" if self.draft == SELF_INT8 else _shown(self.draft)
        how = ", all tokens in one forward" if self.one_forward else ""
        return f"{who} drafts{how}, with its own KV, {'inside' if self.fused else 'before'} the step"


def _shown(draft: Any) -> str:
    return draft if isinstance(draft, str) else f"a {type(draft).__name__}"
