"""Acceptance rules by name."""

from __future__ import annotations

from dataclasses import MISSING, fields

from speccompile.acceptance.base import Rule
from speccompile.acceptance.block import Block
from speccompile.acceptance.exact import Exact
from speccompile.acceptance.rejection import Rejection
from speccompile.acceptance.relaxed import Relaxed
from speccompile.acceptance.typical import Typical
from speccompile.errors import InvalidOption, UnknownAcceptance

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Exact, Rejection, Block, Typical, Relaxed)}

__all__ = ["RULES", "Block", "Exact", "Rejection", "Relaxed", "Rule", "Typical", "choose_rule"]


def choose_rule(given: str | Rule) -> Rule:
    """A rule itself, or the one of that name with its defaults.

    Raises:
        UnknownAcceptance: there is none of that name.
        InvalidOption: it needs options that have no default.
    """
    if isinstance(given, Rule):
        return given
    if not isinstance(given, str) or given not in RULES:
        raise UnknownAcceptance(name=given, available=", ".join(RULES))
    rule = RULES[given]
    needed = [item.name for item in fields(rule) if item.default is MISSING]
    if needed:
        reason = f"it needs {', '.join(needed)}: pass speccompile.acceptance.{rule.__name__}({', '.join(needed)})"
        raise InvalidOption(where="wrap", name="acceptance", value=given, reason=reason)
    return rule()
