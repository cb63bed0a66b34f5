"""A drafter of trees that knows the texts: right tokens on changing branches, wrong ones beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.state import StateSpec
from speccompile.modes import ReadyMode

VOCAB = 128
#: Places of a text.
STRIDE = 160


def parents_of(nodes: int) -> list[int]:
    """Of each node from 1 on: two or three children each."""
    return [0, 0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 8, 8, 9, 11, 12][:nodes]


@dataclass(frozen=True)
class Branching(ReadyMode):
    """Texts are known by their first token. ``texts`` holds them all, one after another, :data:`STRIDE` places each.

    Every ``wrong`` tokens the right one is on no branch.
    """

    texts: tuple[int, ...] = ()
    wrong: int = 5

    name: ClassVar[str] = "branching"
    own_state: ClassVar[tuple[str, ...]] = ("known_texts",)
    drafts_trees: ClassVar[bool] = True

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        spec = StateSpec("known_texts", (len(self.texts),), torch.int64, high=VOCAB, initial=self.texts)
        return [*super().state(tiers), spec]

    def _right(self, tokens: torch.Tensor, length: torch.Tensor, known: torch.Tensor, depth: int) -> torch.Tensor:
        """The token that many places after the newest, ``[B]``; a wrong one now and then."""
        place = (length - 1 + depth).clamp(max=STRIDE - 1)
        right = known[(tokens[:, 0] * STRIDE + place).clamp(max=known.shape[0] - 1)]
        return torch.where((length + depth) % self.wrong == 0, (right + 1) % VOCAB, right)

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, known = own_state
        drafts = [self._right(tokens, length, known, depth) for depth in range(1, draft_len + 1)]
        return torch.stack(drafts, 1), torch.full_like(length, draft_len)

    def propose_tree(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, nodes: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _, known = own_state
        parents = parents_of(nodes)
        depth, right = [0], [torch.ones_like(length, dtype=torch.bool)]
        drafts = []
        for node, parent in enumerate(parents, 1):
            children = [other for other, of in enumerate(parents, 1) if of == parent]
            depth.append(depth[parent] + 1)
            chosen = (length + depth[node]) % len(children) == children.index(node)
            right.append(right[parent] & chosen)
            token = self._right(tokens, length, known, depth[node])
            drafts.append(torch.where(right[node], token, (token + 1 + node) % VOCAB))
        # Constants are made by ops that a trace holds.
        line = [torch.full_like(length, parent) for parent in parents]
        padding = (0, nodes - len(parents))
        tokens, of = (torch.nn.functional.pad(torch.stack(each, 1), padding) for each in (drafts, line))
        return tokens, of, torch.full_like(length, len(parents))

    def explain(self) -> str:
        return "knows the texts"
