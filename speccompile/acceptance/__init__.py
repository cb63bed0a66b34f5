"""Acceptance rules by name."""

from __future__ import annotations

from dataclasses import MISSING, fields

from speccompile.acceptance.base import Rule
from speccompile.acceptance.block import Block
from speccompile.acceptance.exact import Exact
from speccompile.acceptance.forced import Forced, from_environment
from speccompile.acceptance.rejection import Rejection
from speccompile.acceptance.relaxed import Relaxed
from speccompile.acceptance.typical import Typical
from speccompile.errors import InvalidOption, UnknownAcceptance

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Exact, Rejection, Block, Typical, Relaxed, Forced)}

__all__ = ["RULES", "Block", "Exact", "Forced", "Rejection", "Relaxed", "Rule", "Typical", "choose_rule"]


def choose_rule(given: str | Rule | None) -> Rule:
    """The rule ``given``, or the rule of that name with its default options. None is the rule of the environment
    variable (see :func:`~speccompile.acceptance.forced.from_environment`), or ``exact``.

    Raises:
        UnknownAcceptance: no rule has that name.
        InvalidOption: the rule has options without a default.
    """
    if given is None:
        return from_environment() or Exact()
    if isinstance(given, Rule):
        return given
    if given == Forced.name:
        reason = (
            "it needs a number of drafts: pass speccompile.acceptance.Forced(accepted=...), Forced(rates=...) or "
            "Forced(trace=...)"
        )
        raise InvalidOption(where="wrap", name="acceptance", value=given, reason=reason)
    if not isinstance(given, str) or given not in RULES:
        raise UnknownAcceptance(name=given, available=", ".join(RULES))
    rule = RULES[given]
    needed = [item.name for item in fields(rule) if item.default is MISSING]
    if needed:
        reason = f"it needs {', '.join(needed)}: pass speccompile.acceptance.{rule.__name__}({', '.join(needed)})"
        raise InvalidOption(where="wrap", name="acceptance", value=given, reason=reason)
    return rule()
