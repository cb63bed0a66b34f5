"""Default policy of ``wrap``."""

from __future__ import annotations

from speccompile.policies.base import AnyPolicy
from speccompile.policies.cost import Cost
from speccompile.policies.fixed import Fixed


def default_policy(draft_lens: tuple[int, ...], *, text_invariant: bool) -> AnyPolicy:
    """Return ``cost`` if there are several tiers and the choice does not change the text, else the largest tier.

    Args:
        draft_lens: of the tiers, ascending.
        text_invariant: whether the acceptance rule emits the same text at every draft length.
    """
    return Cost() if len(draft_lens) > 1 and text_invariant else Fixed(draft_lens[-1])
