"""What modes have in common whose drafter is a network with its own KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.base import Mode
from speccompile.utils.weight_forms import WEIGHT_FORMS, WeightForm


@dataclass(frozen=True)
class NetworkMode(Mode):
    """Drafts with a network.

    Args:
        draft: the network, or where it is.
        draft_max_len: most tokens of a text that it drafts for; longer ones are decoded without drafts.
        draft_weights: ``"int8"`` or ``"int4"`` rounds the weights of its linears, where our C++ ops are, and on CUDA.
            Drafts may be worse, and the text stays what it is; on a CPU drafts need less time.
    """

    draft: Any = None
    draft_max_len: int | None = None
    draft_weights: WeightForm = "same"

    draft_probs: ClassVar[bool] = True

    def check(self, info: ModelInfo) -> None:
        most = self.draft_max_len
        if not (most is None or (isinstance(most, int) and not isinstance(most, bool) and most >= 2)):
            raise self.invalid("draft_max_len", most, "it has to be an int of at least 2, or None")
        if self.draft_weights not in WEIGHT_FORMS:
            raise self.invalid("draft_weights", self.draft_weights, f"choose from {', '.join(WEIGHT_FORMS)}")


@dataclass(frozen=True)
class SplitMode(NetworkMode):
    """The same where drafting may be in executables of its own, which run before the step.

    Args:
        fused: True drafts inside of the step.
    """

    fused: bool = False

    @property
    def split(self) -> bool:
        return not self.fused

    def check(self, info: ModelInfo) -> None:
        super().check(info)
        if not isinstance(self.fused, bool):
            raise self.invalid("fused", self.fused, "use True or False")
