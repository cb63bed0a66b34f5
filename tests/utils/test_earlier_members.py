"""A class of the user that defines a member of an earlier version is one error, which names what to write instead."""

from __future__ import annotations

import re
from typing import Any

import pytest

from speccompile.acceptance import Rule
from speccompile.acceptance.base import _EARLIER as EARLIER_OF_RULES
from speccompile.errors import MemberOfBefore
from speccompile.modes import Mode, ReadyMode
from speccompile.modes.base import _EARLIER as EARLIER_OF_MODES
from support.errors import raises


def member(*parameters: str) -> Any:
    return eval(f"lambda {', '.join(['self', *parameters])}: []")


@pytest.mark.parametrize("name", [name for name in EARLIER_OF_MODES if "(" not in name])
@pytest.mark.parametrize("base", [Mode, ReadyMode])
def test_a_mode_with_a_member_of_before_is_refused(name: str, base: type) -> None:
    assert not hasattr(Mode, name)
    with raises(MemberOfBefore, owner="Walk", member=name, base="speccompile.modes.Mode"):
        type("Walk", (base,), {name: member("draft_len")})


def test_the_state_of_a_mode_depends_on_the_tiers() -> None:
    with raises(MemberOfBefore, owner="Walk", member="state()", instead=re.compile(r"from state\(tiers\)")):
        type("Walk", (Mode,), {"state": member()})


def test_a_rule_has_one_list_of_passes() -> None:
    assert list(EARLIER_OF_RULES) == ["passes(kind)", "tree_passes"]
    with raises(MemberOfBefore, owner="Mine", member="passes(kind)", instead=re.compile("form.kind in place of kind")):
        type("Mine", (Rule,), {"passes": member("kind")})
    with raises(MemberOfBefore, owner="Mine", member="tree_passes"):
        type("Mine", (Rule,), {"passes": member("form"), "tree_passes": member("tree", "kind")})


def test_other_members_are_the_users() -> None:
    type("Walk", (Mode,), {"drafting": member("form"), "state": member("tiers"), "own_passes": member()})
    type("Mine", (Rule,), {"passes": member("form"), "kind": member()})
