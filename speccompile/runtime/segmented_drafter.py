"""A split drafter that drafts in segments. The policy may stop it between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from speccompile.graph.arena import Arena
from speccompile.graph.keys import TierName
from speccompile.lowering.tier import Tier
from speccompile.policies.base import Row
from speccompile.runtime.policy_controller import Policies
from speccompile.runtime.request import Request
from speccompile.runtime.tier_table import TierTable


class SegmentedDrafter:
    """Runs the drafter of a tier, one executable after another.

    Args:
        arena: an arena with the state ``draft_chances``.
        table: the table with the tiers that verify fewer drafts.
    """

    def __init__(self, arena: Arena, table: TierTable, policies: Policies) -> None:
        self._arena = arena
        self._table = table
        self._policies = policies

    def run(self, name: TierName, requests: Sequence[Request], offered: list[Row]) -> tuple[Tier, list[Row]]:
        """Draft for a tier, or for a smaller one if the policy stops. Return the tier that verifies the drafts, and
        ``offered`` with the scores that the policy has received."""
        tier, stoppable = self._table.tiers[name], self._policies.may_stop
        for segment in tier.segments:
            segment.run_target()
            if not stoppable or segment.draft_len == tier.draft_len:
                continue
            offered = self._with_scores(requests, offered, segment.draft_len)
            if self._policies.stops(offered, segment.draft_len):
                return self._table.tiers[segment.draft_len, *name[1:]], offered
        return tier, offered

    def _with_scores(self, requests: Sequence[Request], offered: list[Row], drafted: int) -> list[Row]:
        chances = self._arena["draft_chances"].tolist()
        return [
            replace(row, scores=tuple(chances[request.slot][: min(drafted, row.draft_len)]))
            for request, row in zip(requests, offered, strict=True)
        ]
