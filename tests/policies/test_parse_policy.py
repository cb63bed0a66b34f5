"""Policies: how their text is read, and what they choose."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccompile.errors import InvalidPolicy, UnknownTier, UserError
from speccompile.policies import ScheduleUpTo
from speccompile.runtime.policy_controller import Fixed, Policy, Schedule, check_tier, parse_policy
from support.errors import raises

TIERS = (0, 1, 3, 7)


@pytest.mark.parametrize("draft_len", TIERS)
def test_fixed_chooses_its_draft_length_for_any_rows(draft_len: int) -> None:
    policy = parse_policy(f"fixed:{draft_len}", TIERS)
    assert policy == Fixed(draft_len)
    assert {policy.choose(rows) for rows in range(1, 20)} == {draft_len}
    assert str(policy) == f"fixed:{draft_len}"


def test_schedule_by_example() -> None:
    policy = parse_policy("schedule:1=7,4=3,8=0", TIERS)
    assert [policy.choose(rows) for rows in range(1, 11)] == [7, 7, 7, 3, 3, 3, 3, 0, 0, 0]
    assert str(policy) == "schedule:1=7,4=3,8=0"


@given(
    later=st.dictionaries(st.integers(2, 30), st.sampled_from(TIERS), max_size=5),
    first=st.sampled_from(TIERS),
    live_rows=st.integers(1, 40),
)
def test_of_a_schedule_the_largest_row_count_reached_counts(later: dict[int, int], first: int, live_rows: int) -> None:
    steps = {1: first, **dict(sorted(later.items()))}
    text = "schedule:" + ",".join(f"{rows}={draft_len}" for rows, draft_len in steps.items())
    policy = parse_policy(text, TIERS)
    assert policy.choose(live_rows) == steps[max(rows for rows in steps if rows <= live_rows)]
    assert parse_policy(str(policy), TIERS) == policy


@pytest.mark.parametrize(
    ("schedule", "live_rows", "wanted"),
    [
        # The cases of TensorRT-LLM's test_draft_len_schedule.py from before its pull request 10860.
        pytest.param({1: 5, 4: 4, 5: 3, 6: 2, 7: 1}, range(1, 8), [5, 5, 5, 4, 3, 2, 1], id="five steps"),
        pytest.param({1: 3, 4: 2, 8: 1}, (1, 3, 4, 7, 8, 9), [3, 3, 2, 2, 1, 1], id="three steps"),
        pytest.param({1: 4, 4: 2, 8: 0}, (1, 4, 8, 9), [4, 2, 0, 0], id="none from eight on"),
    ],
)
def test_lower_bounds_mean_what_tensorrt_llms_keys_meant(
    schedule: dict[int, int], live_rows: Sequence[int], wanted: list[int]
) -> None:
    policy = Schedule(tuple(schedule.items()))
    assert [policy.choose(rows) for rows in live_rows] == wanted


@pytest.mark.parametrize(
    ("schedule", "live_rows", "wanted"),
    [
        # The cases of TensorRT-LLM's test_min_runtime_draft_len.py with a floor of 0.
        pytest.param({4: 4, 8: 2, 32: 1}, (1, 4, 5, 8, 9, 32), [4, 4, 2, 2, 1, 1], id="the steps"),
        pytest.param({4: 4, 8: 2, 32: 1}, (33, 64, 4096), [0, 0, 0], id="above the last key"),
        pytest.param({4: 4, 8: 0}, (4, 5, 8), [4, 0, 0], id="a step of none"),
        pytest.param({50: 4, 200: 3, 350: 2}, (1, 50, 64, 200, 256, 350, 384), [4, 4, 3, 3, 2, 2, 0], id="large keys"),
        pytest.param({1: 4}, (1, 2), [4, 0], id="one key"),
        pytest.param({1: 5, 4: 4, 5: 3, 6: 2, 7: 1}, range(1, 9), [5, 4, 4, 4, 3, 2, 1, 0], id="five steps"),
    ],
)
def test_upper_bounds_mean_what_tensorrt_llms_keys_mean(
    schedule: dict[int, int], live_rows: Sequence[int], wanted: list[int]
) -> None:
    text = "schedule:" + ",".join(f"<={rows}={draft_len}" for rows, draft_len in schedule.items())
    policy = parse_policy(text, range(6))
    assert policy == ScheduleUpTo(tuple(schedule.items()))
    assert str(policy) == text
    assert [policy.choose(rows) for rows in live_rows] == wanted


def test_spaces_are_allowed_around_numbers() -> None:
    assert parse_policy("schedule: <= 4 = 7, <=8=3", TIERS) == ScheduleUpTo(((4, 7), (8, 3)))
    assert parse_policy("fixed: 3", TIERS) == Fixed(3)
    assert parse_policy("schedule: 1=7, 4 = 3", TIERS) == Schedule(((1, 7), (4, 3)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is not the name of a policy"),
        ("7", "'7' is not the name of a policy"),
        ("fixed", "'' is not a whole number"),
        ("fixed:", "'' is not a whole number"),
        ("fixed:-1", "'-1' is not a whole number"),
        ("fixed:1.0", "'1.0' is not a whole number"),
        ("fixed:seven", "'seven' is not a whole number"),
        ("fixed:7,3", "'7,3' is not a whole number"),
        pytest.param("fixed:" + "7" * 5000, "777... is not a whole number", id="thousands of digits"),
        ("fixed:\N{SUPERSCRIPT TWO}", "not a whole number"),
        ("adaptive:3", "'adaptive' is not the name of a policy"),
        ("schedule", "not a whole number"),
        ("schedule:", "not a whole number"),
        ("schedule:7", "not a whole number"),
        ("schedule:1=", "not a whole number"),
        ("schedule:1=7,", "not a whole number"),
        ("schedule:1=7,x=3", "'x' is not a whole number"),
        ("schedule:1=7,4=3,2=1", "must ascend"),
        ("schedule:1=7,4=3,4=1", "must ascend"),
        ("schedule:2=7", "begin with 1=K"),
        ("schedule:0=7,1=3", "begin with 1=K"),
        ("schedule:<=", "'' is not a whole number"),
        ("schedule:<=4", "'' is not a whole number"),
        ("schedule:<4=7", "'<4' is not a whole number"),
        ("schedule:<=0=7", "at least 1"),
        ("schedule:<=4=7,<=4=3", "must ascend"),
        ("schedule:<=8=3,<=4=7", "must ascend"),
        ("schedule:<=4=7,8=3", "either all row counts must be upper bounds"),
    ],
)
def test_text_that_cannot_be_read(text: str, says: str) -> None:
    with raises(InvalidPolicy, policy=text, reason=re.compile(re.escape(says))):
        parse_policy(text, TIERS)


@pytest.mark.parametrize(
    ("text", "tier"), [("fixed:2", 2), ("schedule:1=7,4=5", 5), ("schedule:1=4,4=3", 4), ("schedule:<=4=4", 4)]
)
def test_a_tier_that_was_not_built(text: str, tier: int) -> None:
    with raises(UnknownTier, tier=tier, built="0, 1, 3, 7"):
        parse_policy(text, TIERS)


def test_a_tier_that_was_not_built_is_unknown() -> None:
    for tier in TIERS:
        check_tier(tier, TIERS)
    for wrong in (2, -1, 8, "3", None, True, False):
        with pytest.raises(UnknownTier):
            check_tier(wrong, TIERS)  # type: ignore[arg-type]


def test_an_object_with_choose_is_taken_as_it_is() -> None:
    class Own:
        def choose(self, live_rows: int) -> int:
            return 3

    own = Own()
    assert isinstance(own, Policy)
    assert parse_policy(own, TIERS) is own


@pytest.mark.parametrize("given", [7, None, object(), ["fixed:7"], lambda rows: 7])
def test_what_is_no_policy(given: object) -> None:
    with raises(InvalidPolicy, reason=re.compile(r"no method choose\(live_rows\)")) as error:
        parse_policy(given, TIERS)  # type: ignore[arg-type]
    assert isinstance(error.value, UserError)
    assert isinstance(error.value, ValueError)
