"""The policy of a wrap that names none."""

from __future__ import annotations

from speccompile.policies.base import AnyPolicy
from speccompile.policies.cost import Cost
from speccompile.policies.fixed import Fixed


def default_policy(draft_lens: tuple[int, ...], *, text_invariant: bool) -> AnyPolicy:
    """``cost``, where there is something to choose and a choice does not change the text; else the largest tier.

    Args:
        draft_lens: of the tiers, rising.
        text_invariant: of the acceptance rule.
    """
    return Cost() if len(draft_lens) > 1 and text_invariant else Fixed(draft_lens[-1])
