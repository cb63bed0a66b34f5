"""Parser of ``wrap(policy=...)``: a name, a name with options, or an object."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from speccompile.errors import InvalidPolicy, shown
from speccompile.policies.base import AnyPolicy, LearningPolicy, Policy
from speccompile.policies.cost import Cost
from speccompile.policies.ema import Ema
from speccompile.policies.fixed import Fixed
from speccompile.policies.gate import Gate
from speccompile.policies.options import check_built, read_options
from speccompile.policies.schedule import Schedule, ScheduleUpTo

#: Policies whose options are written ``name=value``.
LEARNING: dict[str, type[Cost] | type[Ema] | type[Gate]] = {"cost": Cost, "ema": Ema, "gate": Gate}

_MOST_DIGITS = 18


def parse_policy(policy: str | AnyPolicy, tiers: Collection[int]) -> AnyPolicy:
    """Parse ``wrap(policy=...)``, and check that its draft lengths were built.

    Args:
        policy: a policy object or one of these texts. ``"fixed:7"``: always K=7. ``"schedule:1=7,4=3,8=0"``: K by the
            fewest live rows. ``"schedule:<=4=7,<=8=3"``: K by the most live rows, and 0 above the last. ``"cost"``,
            ``"ema"``, ``"gate"``: with options or without (``"ema:alpha=0.3,candidates=0/3/7"``).
        tiers: the draft lengths that were built.

    Raises:
        InvalidPolicy: the text cannot be read.
        UnknownTier: the policy names a draft length that was not built.
    """
    parsed = read_policy(policy) if isinstance(policy, str) else policy
    if isinstance(parsed, type) or not isinstance(parsed, Policy | LearningPolicy):
        raise InvalidPolicy(policy=policy, reason="it has no method choose(live_rows)")
    if isinstance(parsed, LearningPolicy):
        parsed.check(tiers)
    else:
        check_built(sorted(_named(parsed)), tiers)
    return parsed


def read_policy(text: str) -> AnyPolicy:
    """Parse the text of a policy without a check of its tiers. Raises InvalidPolicy."""
    kind, _, rest = text.partition(":")
    if kind == "fixed":
        return Fixed(_whole(rest, text))
    if kind == "schedule":
        return _schedule(rest, text)
    if kind in LEARNING:
        policy = LEARNING[kind]
        return policy(**read_options(text, rest, [item.name for item in fields(policy)]))
    raise InvalidPolicy(policy=text, reason=f"{shown(kind)} is not the name of a policy")


def _named(policy: AnyPolicy) -> set[int]:
    """Draft lengths that a simple policy of this package names. A user's policy is checked when it chooses."""
    if isinstance(policy, Schedule | ScheduleUpTo):
        return set(policy.draft_lens)
    return {policy.draft_len} if isinstance(policy, Fixed) else set()


def _schedule(text: str, policy: str) -> Schedule | ScheduleUpTo:
    items = [item.strip() for item in text.split(",")]
    bounds = [item.startswith("<=") for item in items]
    if len(set(bounds)) > 1:
        reason = "either all row counts must be upper bounds ('<=4=7'), or none"
        raise InvalidPolicy(policy=policy, reason=reason)
    parts = [item.removeprefix("<=").partition("=") for item in items]
    steps = tuple((_whole(rows, policy), _whole(draft_len, policy)) for rows, _, draft_len in parts)
    return ScheduleUpTo(steps) if all(bounds) else Schedule(steps)


def _whole(text: str, policy: str) -> int:
    # int() refuses thousands of digits, and no tier has such a draft length.
    if not text.strip().isdecimal() or len(text.strip()) > _MOST_DIGITS:
        raise InvalidPolicy(policy=policy, reason=f"{shown(text)} is not a whole number")
    return int(text)
