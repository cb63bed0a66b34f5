"""The choice of the tier for the next step."""

from __future__ import annotations

from collections.abc import Sequence

from speccompile.graph.arena import Arena
from speccompile.graph.keys import TierName
from speccompile.graph.tree import Tree
from speccompile.lowering.tier import Tier
from speccompile.policies.base import Row
from speccompile.runtime.batch import Batch
from speccompile.runtime.options import StepTraits
from speccompile.runtime.policy_controller import Policies
from speccompile.runtime.policy_inputs import policy_rows
from speccompile.runtime.request import Request
from speccompile.runtime.tier_table import TierTable


class TierChoice:
    """Chooses the next tier. It has:

    - the draft length of the policy, or the smallest one that serves all drafts of the rows. A ready drafter limits
      these by its proposals, a request by ``num_draft_tokens``;
    - the smallest row count that holds all rows;
    - the lowest kind that serves all rows.
    """

    def __init__(self, arena: Arena, batch: Batch, table: TierTable, policies: Policies, traits: StepTraits) -> None:
        self._arena = arena
        self._batch = batch
        self._table = table
        self._policies = policies
        self._traits = traits

    def policy_inputs(self) -> list[Row]:
        """Return, for each row, the number of drafts that the next step could verify."""
        return self.inputs_of(self._batch.rows)

    def inputs_of(self, rows: Sequence[Request]) -> list[Row]:
        """Return, for each of ``rows``, the number of drafts that the next step could verify."""
        traits = self._traits
        scores = self._policies.learns
        return policy_rows(
            rows,
            self._arena,
            self._table.deepest,
            ready=traits.ready,
            scores=scores,
            reach=traits.reach,
            network_on_demand=traits.network_on_demand,
        )

    def draft_len(self, offered: list[Row], unread: int) -> int:
        """Return the draft length of the next step.

        Args:
            offered: the result of :meth:`policy_inputs`.
            unread: runs whose results have not been read.
        """
        draft_len = self._policies.choose(offered, unread)
        # In this case every row's context is longer than the network can read.
        beyond = self._traits.reach is not None and not any(row.draft_len for row in offered)
        if self._batch.without_drafts or beyond:
            return 0
        if isinstance(draft_len, Tree):
            return draft_len if self._any_tree() else 0
        most = max((row.draft_len for row in offered), default=0) if self._traits.ready else self._most_requested()
        return min(size for size in self._table.chains if size >= min(draft_len, most))

    def _any_tree(self) -> bool:
        """Whether some row accepts drafts, and has a tree of them or will have one."""
        wanting = [request for request in self._batch.rows if request.params.num_draft_tokens != 0]
        if not self._traits.ready or self._traits.network_on_demand:
            return bool(wanting)
        return any(request.proposal.nodes for request in wanting)

    def name(self, draft_len: int) -> TierName:
        """Return the name of the tier of that draft length for the current rows."""
        live = len(self._batch.rows)
        kind = "scored" if self._policies.records_logits else self._batch.kind
        return draft_len, min(rows for rows in self._table.row_counts if rows >= live), kind

    def next_tier(self) -> Tier:
        """Return the tier that a step would run now, if all results had been read."""
        return self._table.tiers[self.name(self.draft_len(self.policy_inputs(), 0))]

    def _most_requested(self) -> int:
        """Return the largest ``num_draft_tokens`` of the rows. A request without one accepts the longest."""
        longest = self._table.chains[-1]
        limits = (request.params.num_draft_tokens for request in self._batch.rows)
        return max((longest if limit is None else limit for limit in limits), default=0)
