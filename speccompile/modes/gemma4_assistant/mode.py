"""Gemma 4's assistants draft from the target's own KV and last hidden state.

They compute no keys and values: nothing is kept warm but one hidden state of each sequence, and prompts cost nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from speccompile.graph.state import N, StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.base import Mode
from speccompile.modes.gemma4_assistant.checkpoints import ASSISTANT_TYPE, load_gemma4_assistant, rows_over
from speccompile.modes.gemma4_assistant.head import AssistantRows, Gemma4AssistantHead
from speccompile.modes.gemma4_assistant.passes import (
    HIDDEN,
    DraftByAssistant,
    DraftTreeByAssistant,
    KeepNewestHidden,
    Weights,
)
from speccompile.passes.base import Pass
from speccompile.passes.step.tap_hidden import Tap


@dataclass(frozen=True)
class Gemma4Assistant(Mode):
    """Drafts with an assistant of Gemma 4, inside of the step.

    Args:
        draft: the folder or hub id of an assistant; or one in the target's dtype and on its device.
    """

    draft: Any = None

    name: ClassVar[str] = ASSISTANT_TYPE
    draft_probs: ClassVar[bool] = True
    drafts_trees: ClassVar[bool] = True
    drafts_from_hidden: ClassVar[bool] = True

    def check(self, info: ModelInfo) -> None:
        given = Gemma4AssistantHead | AssistantRows | str | Path
        if not isinstance(self.draft, given) or self.draft == "":
            reason = "give the folder or hub id of an assistant, or a Gemma4AssistantHead"
            raise self.invalid("draft", type(self.draft).__name__ if self.draft is not None else None, reason)

    def loaded(self, model: PreTrainedModel) -> Gemma4Assistant:
        draft, name = self.draft, "that was given"
        if isinstance(draft, str | Path):
            draft, name = load_gemma4_assistant(draft, model), str(draft)
        return replace(self, draft=rows_over(draft, name, model))

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        weight = self.draft.head.post_projection.weight
        return [StateSpec(HIDDEN, (N, len(weight)), weight.dtype)]

    def drafting(self, form: StepForm) -> list[Pass]:
        options: dict[str, Any] = {"rows": self.rows, "kv": self.draft.kv, "weights": self._weights}
        if form.tree is not None:
            return [DraftTreeByAssistant(form.tree, form.draws, form.probabilities, **options)]
        return [DraftByAssistant(*form.chain, **options)]

    @property
    def taps(self) -> tuple[Tap, ...]:
        return (Tap(-1, post_norm=True),)

    def after_commit(self, form: StepForm) -> list[Pass]:
        return [KeepNewestHidden()]

    def rows(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        slots: torch.Tensor,
        position: torch.Tensor,
        *given: torch.Tensor,
        paged: bool,
        tensors: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`speccompile.modes.gemma4_assistant.head.AssistantRows.forward`.

        Args:
            given: the table of pages if the KV is ``paged``; as many ``tensors`` of KV; the assistant's own tensors.
        """
        pages, rest = (given[0], given[1:]) if paged else (None, given)
        names = (name for name, _ in self._tensors)
        own = dict(zip(names, rest[tensors:], strict=True))
        arguments = (tokens, hidden, slots, position, pages, *rest[:tensors])
        logits, carried = torch.func.functional_call(self.draft, own, arguments)
        return logits, carried

    @property
    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [*itertools.chain(self.draft.named_parameters(), self.draft.named_buffers())]

    @property
    def _weights(self) -> Weights:
        return tuple((f"assistant_{name.replace('.', '_')}", value) for name, value in self._tensors)

    def explain(self) -> str:
        if not isinstance(self.draft, AssistantRows):
            return f"the Gemma 4 assistant {self.draft} drafts"
        layers = ", ".join(map(str, self.draft.layers.values()))
        return f"a Gemma 4 assistant drafts over the KV of the target's layers {layers}"
