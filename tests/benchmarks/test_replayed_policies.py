"""The comparison of both drafters with single ones, over drafts that were recorded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.replayed_policies import BOTH, HEAD, LOOKUP, SUFFIX, Recorded, compare
from speccompile.policies import CostTable, Fixed, TierCost
from speccompile.tools.policy_lab.texts import RecordedText

LENGTH = 40
#: A step without drafts takes 10 ms, drafts of a lookup 1 ms more, those of the head 3 ms.
ENTRIES = {(1, 0): TierCost(10.0), (1, 3): TierCost(13.0)}
UNDRAFTED = {(1, 0): TierCost(10.0), (1, 3): TierCost(11.0)}


def text(right: int, found: Sequence[int] = ()) -> RecordedText:
    """Each step has three drafts, of which so many are right."""
    return RecordedText(5, [right] * LENGTH, [3] * LENGTH, {}, found)


def recorded() -> Recorded:
    """A lookup finds three right drafts everywhere in the first prompt, and wrong ones in the second, where the head
    has one right."""
    texts = {
        LOOKUP: [text(3), text(0)],
        SUFFIX: [text(2), text(0)],
        HEAD: [text(0), text(1)],
        BOTH: [text(3, range(LENGTH)), text(1)],
    }
    return Recorded(["quotes", "invents"], texts, CostTable(ENTRIES, UNDRAFTED), (0, 3))


def test_each_prompt_has_the_time_of_its_steps() -> None:
    # Four tokens a step, three in the last but one, and so on.
    assert recorded().milliseconds(LOOKUP, Fixed(3), [1, 0]) == {1: LENGTH * 11 - 1, 0: LENGTH / 4 * 11}
    assert recorded().milliseconds(HEAD, Fixed(0), [0]) == {0: LENGTH * 10}
    # With both drafters the head does not run before a step whose drafts are found.
    assert recorded().milliseconds(BOTH, Fixed(3), [0, 1])[0] == LENGTH / 4 * 11


def test_both_are_compared_with_the_best_of_each_category() -> None:
    found = {row.category: row for row in compare(recorded(), ["fixed:3"], seeds=2)}
    assert [row.best for row in found.values()] == ["ngram, K=3", "head, K=3", "ngram, K=3"]
    assert found["quotes"].ratios == found["invents"].ratios == (1.0, 1.0)
    both = sum(recorded().milliseconds(BOTH, Fixed(3), [0, 1]).values())
    lookup = sum(recorded().milliseconds(LOOKUP, Fixed(3), [0, 1]).values())
    assert found["all"].mean == pytest.approx(lookup / both)
