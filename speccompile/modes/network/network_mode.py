"""Base classes of modes whose drafter is a network with its own KV."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.base import Mode
from speccompile.modes.network.catch_up import most_unread
from speccompile.utils.numbers import is_int
from speccompile.utils.weight_forms import DRAFT_WEIGHTS, DraftWeights, WeightForm


@dataclass(frozen=True)
class NetworkMode(Mode):
    """A mode that drafts with a network.

    Args:
        draft: the network, or the folder or hub id of its checkpoint.
        draft_max_len: the largest number of tokens of a sequence that the network drafts for. Longer sequences are
            decoded without drafts.
        draft_weights: ``"int8"`` or ``"int4"`` rounds the weights of its linears. It needs our C++ ops, or CUDA. The
            drafts can be worse; the emitted tokens do not change. On a CPU drafts need less time. ``"same"`` keeps the
            weights as they are. ``"auto"`` is ``"int4"`` for a head and ``"int8"`` for a draft model, with our C++ ops
            and an acceptance rule whose text does not depend on drafts, unless the network is the target itself,
            learns, or the originals are freed; elsewhere it is ``"same"``.
    """

    draft: Any = None
    draft_max_len: int | None = None
    draft_weights: DraftWeights = "auto"

    draft_probs: ClassVar[bool] = True

    def check(self, info: ModelInfo) -> None:
        most = self.draft_max_len
        if not (most is None or (is_int(most) and most >= 2)):
            raise self.invalid("draft_max_len", most, "it must be an int of at least 2, or None")
        if self.draft_weights not in DRAFT_WEIGHTS:
            raise self.invalid("draft_weights", self.draft_weights, f"choose from {', '.join(DRAFT_WEIGHTS)}")

    @property
    def draft_form(self) -> WeightForm:
        """The form of the network's linears; ``same`` before :meth:`with_draft_weights` has replaced ``"auto"``."""
        return "same" if self.draft_weights == "auto" else self.draft_weights

    def with_draft_weights(self, form: WeightForm) -> Self:
        return replace(self, draft_weights=form) if self.draft_weights == "auto" else self

    def drafts_up_to(self, max_len: int) -> int:
        return min(self.draft_max_len or max_len, max_len)


@dataclass(frozen=True)
class SplitMode(NetworkMode):
    """A mode with a network whose drafting can run in separate executables, before the step.

    Args:
        fused: True drafts inside of the step. False drafts in separate executables.
    """

    fused: bool = False

    @property
    def split(self) -> bool:
        return not self.fused

    @property
    def catches_up(self) -> bool:
        """Whether the network reads what the target has read only when it drafts: see :meth:`unread_tokens`. By default
        every step updates it."""
        return False

    def unread_tokens(self, deepest: int) -> int:
        return most_unread(deepest) if self.catches_up else 0

    def check(self, info: ModelInfo) -> None:
        super().check(info)
        if not isinstance(self.fused, bool):
            raise self.invalid("fused", self.fused, "use True or False")
