"""The correction of a block's logits by all drafts before a place, of Domino.

Source: "Domino", as in SpecForge (``DFlashDraftModel`` with ``projector_type="domino"``), speculators'
``models/dflash/domino.py``, and SGLang's ``speculative/domino_utils.py``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class PrefixGru(nn.Module):
    """One step of a GRU without biases. Names and layout of its weights are those of ``torch.nn.GRU``."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.zeros(3 * size, inputs))
        self.weight_hh_l0 = nn.Parameter(torch.zeros(3 * size, size))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The state ``[..., size]`` after the input ``x`` ``[..., inputs]``, from the state before it."""
        of_input, of_state = (
            F.linear(x, self.weight_ih_l0).chunk(3, -1),
            F.linear(state, self.weight_hh_l0).chunk(3, -1),
        )
        reset, update = ((first + second).sigmoid() for first, second in zip(of_input[:2], of_state[:2], strict=True))
        new = (of_input[2] + reset * of_state[2]).tanh()
        return (1 - update) * new + update * state


class DominoHead(nn.Module):
    """A GRU over the newest token and the drafts of a block; its state and the output at a place correct the logits.

    Args:
        size: of the state; inner_size: of the projection; draft_vocab: Vd.
    """

    def __init__(self, hidden_size: int, size: int, inner_size: int, draft_vocab: int) -> None:
        super().__init__()
        self.size = size
        self.prefix_gru = PrefixGru(hidden_size, size)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + size, inner_size, bias=False),
            nn.SiLU(),
            nn.Linear(inner_size, draft_vocab, bias=False),
        )

    def correction(self, normed: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Changes of the logits, ``[B, T, Vd]``, by outputs ``[B, T, M]`` and states ``[B, T, size]``."""
        out: torch.Tensor = self.embed_proj(torch.cat([normed, state], dim=-1))
        return out
