"""Which draft length the next step uses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from speccompile.errors import InvalidPolicy, UnknownTier


@runtime_checkable
class Policy(Protocol):
    """Asked before every step."""

    def choose(self, live_rows: int) -> int:
        """The draft length for a step with ``live_rows`` rows; it has to be that of a tier."""


@dataclass(frozen=True)
class Fixed:
    """Always the same draft length."""

    draft_len: int

    def choose(self, live_rows: int) -> int:
        return self.draft_len

    def __str__(self) -> str:
        return f"fixed:{self.draft_len}"


@dataclass(frozen=True)
class Schedule:
    """Draft length by the number of live rows: of ``steps`` (rows, K), the largest rows that is reached counts."""

    steps: tuple[tuple[int, int], ...]

    def choose(self, live_rows: int) -> int:
        reached = [draft_len for rows, draft_len in self.steps if rows <= live_rows]
        return reached[-1]

    def __str__(self) -> str:
        return "schedule:" + ",".join(f"{rows}={draft_len}" for rows, draft_len in self.steps)


def parse_policy(policy: str | Policy, tiers: Collection[int]) -> Policy:
    """``"fixed:7"``, ``"schedule:1=7,4=3,8=0"`` (from so many live rows on, that K), or a policy object.

    Raises:
        InvalidPolicy: the text cannot be read.
        UnknownTier: it names a draft length that was not built.
    """
    if not isinstance(policy, str):
        if isinstance(policy, type) or not isinstance(policy, Policy):
            raise InvalidPolicy(policy=policy, reason="it has no method choose(live_rows)")
        return policy
    kind, _, rest = policy.partition(":")
    if kind == "fixed":
        parsed: Policy = Fixed(_whole(rest, policy))
        named = {parsed.choose(1)}
    elif kind == "schedule":
        parsed = _schedule(rest, policy)
        named = {draft_len for _, draft_len in parsed.steps}
    else:
        raise InvalidPolicy(policy=policy, reason=f"there is no policy {kind!r}")
    for draft_len in sorted(named):
        check_tier(draft_len, tiers)
    return parsed


def check_tier(draft_len: int, tiers: Collection[int]) -> None:
    """Raises UnknownTier when no tier has that draft length."""
    if not isinstance(draft_len, int) or isinstance(draft_len, bool) or draft_len not in tiers:
        raise UnknownTier(tier=draft_len, built=", ".join(str(tier) for tier in sorted(tiers)))


def _schedule(text: str, policy: str) -> Schedule:
    steps = []
    for item in text.split(","):
        rows, _, draft_len = item.partition("=")
        steps.append((_whole(rows, policy), _whole(draft_len, policy)))
    if [rows for rows, _ in steps] != sorted({rows for rows, _ in steps}):
        raise InvalidPolicy(policy=policy, reason="its row counts do not rise")
    if steps[0][0] != 1:
        raise InvalidPolicy(policy=policy, reason="it does not say what one row uses; begin with 1=K")
    return Schedule(tuple(steps))


def _whole(text: str, policy: str) -> int:
    if not text.strip().isdecimal():
        raise InvalidPolicy(policy=policy, reason=f"{text!r} is no whole number")
    return int(text)
