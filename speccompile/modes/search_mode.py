"""A ready drafter whose proposals come from a search, which has only the options that change steps."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from speccompile.modes.ready_mode import ReadyMode
from speccompile.passes.step.propose import ProposeFunction


class Proposals(Protocol):
    """The proposals of a mode; see the members of :class:`~speccompile.modes.ready_mode.ReadyMode` of these names."""

    @property
    def propose(self) -> ProposeFunction: ...

    @property
    def propose_whole(self) -> ProposeFunction: ...

    @property
    def propose_tree(self) -> ProposeFunction: ...


@dataclass(frozen=True)
class SearchMode(ReadyMode):
    """A mode that defines :attr:`search`. The keys of stored steps include the search, and not the mode: a corpus, for
    example, changes no step."""

    @property
    @abstractmethod
    def search(self) -> Proposals:
        """The search of a wrap. Equal options of steps are equal searches."""

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, ...]:
        return self.search.propose(tokens, length, *own_state, draft_len=draft_len)

    def propose_tree(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, nodes: int
    ) -> tuple[torch.Tensor, ...]:
        return self.search.propose_tree(tokens, length, *own_state, nodes=nodes)

    @property
    def proposer(self) -> ProposeFunction:
        return self.search.propose

    @property
    def whole_proposer(self) -> ProposeFunction | None:
        return self.search.propose_whole

    @property
    def tree_proposer(self) -> ProposeFunction:
        return self.search.propose_tree
