"""N-gram drafting (prompt lookup): the tokens that followed an earlier occurrence of the newest tokens.

Source: Saxena, "Prompt Lookup Decoding" (2023), and transformers' PromptLookupCandidateGenerator. Unlike transformers,
this mode prefers the most recent occurrence, and runs inside the step.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.ready_mode import ReadyMode
from speccompile.ops.ngram import continue_match
from speccompile.passes.step.propose import ProposeFunction
from speccompile.utils.numbers import is_int


@dataclass(frozen=True)
class NGram(ReadyMode):
    """Drafts the tokens after the most recent match of the longest suffix n-gram.

    Args:
        max_ngram: the length of the longest suffix that is searched.
        min_ngram: the length of the shortest suffix that is searched.
    """

    max_ngram: int = 3
    min_ngram: int = 1

    name: ClassVar[str] = "ngram"
    drafts_trees: ClassVar[bool] = True
    tree_devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def check(self, info: ModelInfo) -> None:
        for name in ("max_ngram", "min_ngram"):
            value = getattr(self, name)
            if not is_int(value) or value < 1:
                raise self.invalid(name, value, "it must be an int >= 1")
        if self.min_ngram > self.max_ngram:
            raise self.invalid("min_ngram", self.min_ngram, f"it must be at most max_ngram={self.max_ngram}")

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Propose the tokens after the match; see :func:`speccompile.ops.ngram.continue_match`."""
        return continue_match(tokens, length, self.max_ngram, self.min_ngram, draft_len)

    def propose_tree(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, nodes: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Propose a tree of the tokens after several matches; see :func:`speccompile.ops.ngram.tree`."""
        found, parents, count = torch.ops.speccompile.ngram_tree(tokens, length, self.max_ngram, self.min_ngram, nodes)
        return found, parents, count

    @property
    def whole_proposer(self) -> ProposeFunction | None:
        # A subclass with another propose has no such op.
        return self.match if type(self).propose is NGram.propose else None

    def match(
        self, tokens: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, *, draft_len: int, facts: Set[str]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`propose` as one op, over all slots' ``tokens`` ``[N, S]`` and ``length`` ``[N]``."""
        drafts, lens = torch.ops.speccompile.match_ngram(
            tokens, length, slots, self.max_ngram, self.min_ngram, draft_len
        )
        return drafts, lens

    def explain(self) -> str:
        return f"continues the most recent match of the last {self.max_ngram} to {self.min_ngram} tokens"
