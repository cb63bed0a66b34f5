"""A drafter and a policy that know nothing, for the tests of sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.modes.ready_mode import ReadyMode

LIKELY = 10


@dataclass(frozen=True)
class Random(ReadyMode):
    """Drafts tokens below ``LIKELY`` that follow from the place alone, as many as that says too."""

    name: ClassVar[str] = "random_drafts"

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = length[:, None] + torch.arange(draft_len, device=length.device)
        return (places * 7919 + 13) * (places + 5) % LIKELY, length % (draft_len + 1)

    def explain(self) -> str:
        return "drafts that have nothing to do with the text"
