"""Several drafters: each row uses the draft of the first drafter whose draft is good enough."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

import torch

import speccompile.ops.merge_trees  # noqa: F401  registers the op
from speccompile.errors import InvalidOption
from speccompile.graph.state import DrafterMemory, N, StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.base import DRAFT_SOURCE
from speccompile.modes.ready_mode import ReadyMode
from speccompile.modes.search_mode import SearchMode
from speccompile.ops.draft_rows import form_of
from speccompile.ops.proposals import store_rows_, take_passing
from speccompile.passes.base import Pass
from speccompile.passes.step.propose import ProposeFunction
from speccompile.utils.numbers import is_real


@dataclass(frozen=True)
class ComposedDrafter:
    """A drafter of several.

    Args:
        propose, whole: :attr:`~speccompile.modes.ready_mode.ReadyMode.proposer` and ``whole_proposer``.
        tree: its ``tree_proposer``.
        count: the number of its state tensors.
        scored: it returns scores. A drafter without scores gets scores of 1; policies calibrate them.
    """

    propose: ProposeFunction
    whole: ProposeFunction | None
    tree: ProposeFunction
    count: int
    scored: bool

    def proposal(
        self,
        tokens: torch.Tensor,
        length: torch.Tensor,
        slots: torch.Tensor,
        *own: torch.Tensor,
        draft_len: int,
        facts: Set[str],
    ) -> tuple[torch.Tensor, ...]:
        """Propose for the rows ``slots``; arguments are those of ``whole``."""
        if self.whole is not None:
            return self.whole(tokens, length, slots, *own, draft_len=draft_len, facts=facts)
        return self.propose(tokens[slots], length[slots], *([slots] if own else []), *own, draft_len=draft_len)


@dataclass(frozen=True)
class FirstPassing:
    """The first proposal of each row that passes.

    Args:
        parts: the drafters, from first to last choice.
        min_score, last_always: the options of :class:`Composed`.
    """

    parts: tuple[ComposedDrafter, ...]
    min_score: float
    last_always: bool

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose a proposal for each row. All drafters propose in every step, since this updates their state.

        Args:
            own_state: slots ``[B]``, the state :data:`~speccompile.modes.base.DRAFT_SOURCE`, and the state tensors of
                each drafter in order.
        """
        slots, source, *tables = own_state
        taken = [
            part.propose(tokens, length, *([slots] if own else []), *own, draft_len=draft_len)
            for part, own in self._with_state(tables)
        ]
        return self._first(taken, source, slots, frozenset())

    def propose_whole(
        self,
        tokens: torch.Tensor,
        length: torch.Tensor,
        slots: torch.Tensor,
        source: torch.Tensor,
        *tables: torch.Tensor,
        draft_len: int,
        facts: Set[str],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """:meth:`propose`, over the sequences of all slots."""
        taken = [
            part.proposal(tokens, length, slots, *own, draft_len=draft_len, facts=facts)
            for part, own in self._with_state(tables)
        ]
        return self._first(taken, source, slots, facts)

    def propose_tree(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, nodes: int
    ) -> tuple[torch.Tensor, ...]:
        """Propose the likeliest tokens of the trees of all drafters."""
        slots, _, *tables = own_state
        trees = []
        for part, own in self._with_state(tables):
            found, parents, count, *scores = part.tree(tokens, length, *([slots] if own else []), *own, nodes=nodes)
            ones = torch.ones(found.shape, device=found.device)
            trees.append((found, parents, count, *(scores or [ones])))
        of_all = [list(values) for values in zip(*trees, strict=True)]
        merged: tuple[torch.Tensor, ...] = torch.ops.speccompile.merge_trees(*of_all, nodes)
        return merged

    def _with_state(self, tables: Sequence[torch.Tensor]) -> Iterator[tuple[ComposedDrafter, Sequence[torch.Tensor]]]:
        for part in self.parts:
            own, tables = tables[: part.count], tables[part.count :]
            yield part, own

    def _first(
        self,
        taken: Sequence[tuple[torch.Tensor, ...]],
        source: torch.Tensor,
        slots: torch.Tensor,
        facts: Set[str],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        last = len(self.parts) - 1
        choose = form_of(take_passing, facts)
        chosen: tuple[torch.Tensor | None, ...] = (None,) * 4
        # In reverse order: a draft that passes replaces the draft of a later drafter. If no lookup passes and
        # last_always is not set, the index is that of the network, which comes after the lookups.
        for place in range(last, -1, -1):
            drafts, lens, *own_scores = taken[place]
            scores = own_scores[0] if self.parts[place].scored else None
            always = self.last_always and place == last
            chosen = choose(drafts, lens, scores, *chosen, place, float(self.min_score), always)
        first, count, of_first, by = chosen
        assert first is not None and count is not None and of_first is not None and by is not None
        form_of(store_rows_, facts)(source, slots, by)
        return first, count, of_first


@dataclass(frozen=True)
class Composed(SearchMode):
    """Several drafters, such as ``mode=["suffix", "ngram"]``.

    A draft with scores passes if at least ``min_score`` of its tokens are expected to be accepted: the sum of its
    cumulative probabilities, Arctic's score. A draft without scores always passes.

    Args:
        drafters: the drafters, from first to last choice.
        min_score: the expected number of accepted tokens, at least 0.
        last_always: the last drafter's draft passes with any score.
    """

    drafters: tuple[ReadyMode, ...] = ()
    min_score: float = 0.75
    last_always: bool = True

    name: ClassVar[str] = "composed"
    scored: ClassVar[bool] = True
    drafts_trees: ClassVar[bool] = True
    tree_devices: ClassVar[tuple[str, ...]] = ("cpu",)

    @property
    def drafts_chains_alone(self) -> str:
        chains = [drafter.name for drafter in self.drafters if not drafter.drafts_trees]
        return f"{' and '.join(chains)} drafts chains" if chains else ""

    @property
    def drafter_names(self) -> tuple[str, ...]:
        return tuple(drafter.name for drafter in self.drafters)

    @property
    def own_state(self) -> tuple[str, ...]:  # type: ignore[override]
        return (DRAFT_SOURCE, *(name for drafter in self.drafters for name in drafter.own_state))

    def check(self, info: ModelInfo) -> None:
        good = is_real(self.min_score) and self.min_score >= 0
        if not good:
            reason = "it must be a number of at least 0"
            raise InvalidOption(where=f"mode {self.label!r}", name="min_score", value=self.min_score, reason=reason)
        for drafter in self.drafters:
            drafter.check(info)

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        shared = super().state(tiers)
        known = {spec.name for spec in shared}
        source = StateSpec(DRAFT_SOURCE, (N,), torch.int64, high=2)
        own = [spec for drafter in self.drafters for spec in drafter.state(()) if spec.name not in known]
        return [*shared, source, *own]

    @property
    def memory(self) -> DrafterMemory:
        parts = [drafter.memory for drafter in self.drafters]
        tables = tuple(name for part in parts for name in part.tables)
        return DrafterMemory(tables, tuple(name for part in parts for name in part.cursors))

    def start(self, state: Mapping[str, torch.Tensor]) -> None:
        for drafter in self.drafters:
            drafter.start(state)

    def after_logits(self, form: StepForm) -> list[Pass]:
        return [item for drafter in self.drafters for item in drafter.after_logits(form)]

    @property
    def search(self) -> FirstPassing:
        parts = [
            ComposedDrafter(
                drafter.proposer,
                drafter.whole_proposer,
                drafter.tree_proposer,
                len(drafter.own_state),
                drafter.scored,
            )
            for drafter in self.drafters
        ]
        return FirstPassing(tuple(parts), self.min_score, self.last_always)

    def explain(self) -> str:
        parts = "; else ".join(f"{drafter.name} {drafter.explain()}" for drafter in self.drafters)
        return f"{parts}. A draft is not used if fewer than {self.min_score:g} of its tokens are expected to be right"
