"""An acceptance rule that accepts no draft, and keeps how many would have been right after each token of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.acceptance import Rule
from speccompile.acceptance.lossy import keep_passes
from speccompile.graph.state import K, S, StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.passes.base import Pass

OFFERED, RIGHT = "watched_offered", "watched_right"


@dataclass(frozen=True)
class Watched(Rule):
    """Every step emits the target's own token, so that a drafter drafts after every prefix of the greedy text. The
    state tensors ``OFFERED`` and ``RIGHT``, int64 ``[S]``, have the number of drafts and of those that agree with the
    target, by the number of committed tokens. They are of one row: nothing else may run beside it, and no request
    clears them."""

    name: ClassVar[str] = "watched"
    lossless: ClassVar[bool] = False
    # The text does not depend on the drafts, but prompts that run beside steps would be no part of the record.
    text_invariant: ClassVar[bool] = False
    greedy_only: ClassVar[bool] = True

    def state(self) -> list[StateSpec]:
        return [StateSpec(name, (S,), torch.int64, high=K + 1) for name in (OFFERED, RIGHT)]

    def passes(self, form: StepForm) -> list[Pass]:
        return keep_passes(watch, form, (OFFERED, RIGHT))

    def explain(self) -> str:
        return "FOR BENCHMARKS: no draft is accepted, and those that are right are counted"


def watch(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    text: torch.Tensor,
    length: torch.Tensor,
    _slots: torch.Tensor,
    offered: torch.Tensor,
    right: torch.Tensor,
) -> torch.Tensor:
    """Write the counts of the row, and return that no draft is accepted, bool ``[B, K]``."""
    is_right = (drafts == scores[:, : drafts.shape[1]].argmax(-1)) & (drafts >= 0)
    offered.index_put_((length,), (drafts >= 0).sum(1))
    right.index_put_((length,), is_right.long().cumprod(1).sum(1))
    return torch.zeros_like(is_right)
