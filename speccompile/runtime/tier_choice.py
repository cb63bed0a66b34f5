"""Which tier the next step runs."""

from __future__ import annotations

from speccompile.graph.arena import Arena
from speccompile.graph.keys import TierName
from speccompile.lowering.tier import Tier
from speccompile.policies.base import Row
from speccompile.runtime.batch import Batch
from speccompile.runtime.options import StepTraits
from speccompile.runtime.policy_controller import Policies
from speccompile.runtime.policy_inputs import policy_rows
from speccompile.runtime.tier_table import TierTable


class TierChoice:
    """The draft length that the policy wants, or the smallest that serves all drafts that rows may have: those that a
    ready drafter proposed, those that requests want at most; the smallest row count that holds all rows; and the least
    kind that serves all of them."""

    def __init__(self, arena: Arena, batch: Batch, table: TierTable, policies: Policies, traits: StepTraits) -> None:
        self._arena = arena
        self._batch = batch
        self._table = table
        self._policies = policies
        self._traits = traits

    def offers(self) -> list[Row]:
        """How many drafts the next step could judge, for each row."""
        traits, longest = self._traits, self._table.draft_lens[-1]
        scores = self._policies.learns
        return policy_rows(
            self._batch.rows, self._arena, longest, ready=traits.ready, scores=scores, reach=traits.reach
        )

    def draft_len(self, offered: list[Row], unread: int) -> int:
        """
        Args:
            unread: runs whose results have not been read.
        """
        draft_len = self._policies.choose(offered, unread)
        # No row is within the reach of the network.
        beyond = self._traits.reach is not None and not any(row.draft_len for row in offered)
        if self._batch.stuck or beyond:
            return 0
        most = max((row.draft_len for row in offered), default=0) if self._traits.ready else self._most_wanted()
        return min(size for size in self._table.draft_lens if size >= min(draft_len, most))

    def name(self, draft_len: int) -> TierName:
        """The tier of that draft length for the rows of now."""
        live = len(self._batch.rows)
        return draft_len, min(rows for rows in self._table.row_counts if rows >= live), self._batch.kind

    def next_tier(self) -> Tier:
        """The tier that a step would run now, if all results were read."""
        return self._table.tiers[self.name(self.draft_len(self.offers(), 0))]

    def _most_wanted(self) -> int:
        longest = self._table.draft_lens[-1]
        wanted = (request.params.num_draft_tokens for request in self._batch.rows)
        return max((longest if count is None else count for count in wanted), default=0)
