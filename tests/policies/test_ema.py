"""``ema`` is SGLang's adaptive speculation, step by step: the cases of its ``test_adaptive_spec_params.py``."""

from __future__ import annotations

import re
from typing import Any

import pytest

from speccompile.errors import InvalidPolicy, UnknownTier
from speccompile.policies import Done, Ema, Ladder, Row, Upcoming, parse_policy, start
from speccompile.policies.base import Chooser
from speccompile.policies.ema import EmaRange
from support.errors import raises

TIERS = (0, 1, 3, 5, 7)
AT_ONCE: dict[str, Any] = {"alpha": 1.0, "warmup": 0, "interval": 1}

#: Options, candidates, and of each step the rows' accepted drafts, then K and (unless None) the average.
Step = tuple[list[int], int, float | None]
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], list[Step]]] = {
    "initial_steps_snaps_to_middle_when_missing": ({"initial": 2}, (1, 3, 7), [([], 3, 2.0)]),
    "update_respects_warmup_and_interval": (
        {"initial": 3, "alpha": 1.0, "warmup": 1, "interval": 2},
        (1, 3, 7),
        [([0, 0], 3, None), ([0, 0], 3, None), ([0, 0], 1, None)],
    ),
    "empty_batches_do_not_consume_warmup_or_shift_steps": (
        {"initial": 3, "alpha": 1.0, "warmup": 1, "interval": 1},
        (1, 3, 7),
        [([], 3, 2.0), ([0, 0], 3, None), ([0, 0], 1, None)],
    ),
    "update_scales_up_across_candidates": (
        {"initial": 1, **AT_ONCE},
        (1, 3, 7),
        [([1, 1], 3, None), ([3, 3], 7, None)],
    ),
    "update_can_scale_down_across_candidates_in_one_recompute": (
        {"initial": 7, **AT_ONCE},
        (1, 3, 7),
        [([0, 0], 1, None)],
    ),
    "exact_rise_threshold_does_not_upshift": (
        {"initial": 3, **AT_ONCE},
        (1, 3, 7),
        [([2, 3], 3, 2.5), ([3, 3], 7, None)],
    ),
    "exact_drop_threshold_does_downshift": (
        {"initial": 3, **AT_ONCE, "down": 0.0, "up": 0.5},
        (1, 3, 7),
        [([0, 1], 1, 0.5)],
    ),
    "hysteresis_can_prevent_premature_upshift": (
        {"initial": 3, **AT_ONCE, "up": 0.75},
        (1, 3, 7),
        [([3, 3], 3, None), ([4, 4], 7, None)],
    ),
    "down_hysteresis_can_prevent_premature_downshift": (
        {"initial": 7, **AT_ONCE, "down": -0.75},
        (1, 3, 7),
        [([2, 2], 7, None), ([1, 1], 3, None)],
    ),
    "multi_batch_sequence_can_ramp_up_then_back_down": (
        {"initial": 3, "alpha": 0.5, "warmup": 0, "interval": 1, "down": 0.0},
        (1, 3, 7),
        [([4, 4], 7, 3.0), ([0, 0], 3, 1.5), ([0, 0], 3, 0.75), ([0, 0], 1, 0.375)],
    ),
    "zero_step_mixed_slot_drops_probes_and_rechecks": (
        {"initial": 3, **AT_ONCE, "down": 0.0},
        (0, 3),
        [([0, 0], 0, 0.0), ([3, 3], 3, 0.0), ([0, 0], 0, 0.0)],
    ),
    # Not a case of theirs: what their code does with a range that begins without drafts.
    "a_range_that_begins_at_zero_probes_from_a_neutral_average": (
        {"initial": 0, **AT_ONCE},
        (0, 3),
        [([0], 3, 2.0), ([3], 3, 3.0)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_range_does_what_sglangs_slot_does(case: str) -> None:
    options, candidates, steps = CASES[case]
    tested = EmaRange(Ema(**options), 1, candidates, Ladder(candidates))
    for number, (accepted, draft_len, average) in enumerate(steps):
        tested.note(accepted)
        assert tested.draft_len == draft_len, number
        if average is not None:
            assert tested.average == average, number


def test_a_ceiling_caps_what_is_no_rise() -> None:
    """``test_ceiling_coeff_caps_steps``; down to K=3 alone leads the threshold, to K=1 the ceiling."""
    for ceiling, wanted in ((1.0, 1), (0.0, 3)):
        tested = EmaRange(Ema(initial=7, **AT_ONCE, ceiling=ceiling, down=-0.75), 1, (1, 3, 7), Ladder((1, 3, 7)))
        tested.average = 1.0
        tested.note([1, 1])
        assert tested.draft_len == wanted
    rising = EmaRange(Ema(initial=1, **AT_ONCE, ceiling=1.0), 1, (1, 3, 7), Ladder((1, 3, 7)))
    rising.note([1, 1])
    assert rising.draft_len == 3, "a rise is not capped"
    assert Ema().ceiling == 0


def play(chooser: Chooser, steps: int, right: int, rows: int = 1) -> list[int]:
    """Draft lengths that it chooses while ``right`` drafts of each row are right."""
    chosen = []
    for _ in range(steps):
        draft_len = chooser.choose(upcoming(rows))
        accepted = min(right, draft_len)
        same = ((draft_len,) * rows, (accepted,) * rows, (accepted + 1,) * rows)
        chooser.note(Done(draft_len, tuple(range(rows)), (50,) * rows, *same))
        chosen.append(draft_len)
    return chosen


def upcoming(rows: int) -> Upcoming:
    return Upcoming(tuple(Row(request, 50, 7) for request in range(rows)))


def test_the_first_decision_comes_after_warm_up_and_interval() -> None:
    """Fifteen steps of 10 + 5, at the middle of the tiers; from then on every five."""
    assert play(start(Ema(), Ladder((0, 1, 3, 7))), 21, 0) == [3] * 15 + [0] * 5 + [1]
    assert play(start(Ema(candidates=(1, 3, 7), initial=7), Ladder(TIERS)), 16, 0) == [7] * 15 + [1]


#: SGLang's default configuration.
BY_ROWS = "ema:down=1:-0.25;8:0.0,initial=3,candidates=1:1/3/5/7;8:0/1/3;32:0/1;64:0/"


@pytest.mark.parametrize(
    ("rows", "wanted"), [(1, 3), (7, 3), (8, 3), (31, 3), (32, 1), (63, 1), (64, 0), (1000, 0)], ids=str
)
def test_live_rows_choose_the_range_below_them(rows: int, wanted: int) -> None:
    """``test_routes_to_floor_slot_without_cuda_graph``: the first and the last tier show which range is valid."""
    chooser = start(parse_policy(BY_ROWS, TIERS), Ladder(TIERS))
    chosen = play(chooser, 40, 7, rows)
    assert chosen[0] == wanted
    assert chosen[-1] == {1: 7, 7: 7, 8: 3, 31: 3, 32: 1, 63: 1, 64: 0, 1000: 0}[rows]


def test_a_range_learns_from_its_own_rows_alone() -> None:
    """``test_observe_verify_feeds_the_routed_slot``."""
    chooser = start(parse_policy(BY_ROWS, TIERS), Ladder(TIERS))
    assert play(chooser, 40, 7)[-1] > 1
    assert chooser.choose(upcoming(32)) == 1


def test_thresholds_of_a_range_count_before_those_of_all() -> None:
    """``test_global_hysteresis_inherited`` and ``test_entry_hysteresis_overrides_global``: one accepted draft of K=1
    lies 0.5 above the threshold to rise."""
    chooser = start(Ema(**AT_ONCE, up={1: 0.5, 4: 0.1}, candidates={1: (1, 3), 4: (1, 3)}, initial=1), Ladder(TIERS))
    assert play(chooser, 3, 1, rows=1) == [1, 1, 1]
    assert play(chooser, 3, 1, rows=4)[-1] == 3


def test_a_step_without_rows_is_none() -> None:
    chooser = start(parse_policy(BY_ROWS, TIERS), Ladder(TIERS))
    chooser.note(Done(3, (), (), (), (), ()))
    assert chooser.choose(Upcoming(())) == 3


def test_text_and_policy_by_rows() -> None:
    policy = Ema(candidates={1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}, down={1: -0.25, 8: 0.0}, initial=3)
    assert parse_policy(BY_ROWS, TIERS) == policy
    assert str(policy) == BY_ROWS


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ema:down=4:0.5", "has no entry for one row"),
        ("ema:down=0:0.5;1:0", "rows of down=0 must be a whole number of at least 1"),
        ("ema:up=1:0/1", "'0/1' is not a number"),
        ("ema:ceiling=-1", "ceiling=-1 must be a number at least 0"),
        ("ema:ceiling=1:1;4:-1", "ceiling=-1 must be a number at least 0"),
        ("ema:initial=-1", "initial=-1 must be a whole number"),
    ],
)
def test_what_is_refused(text: str, reason: str) -> None:
    with raises(InvalidPolicy, reason=re.compile(reason)):
        parse_policy(text, TIERS)


def test_an_initial_length_has_to_be_built() -> None:
    with raises(UnknownTier, tier=2):
        parse_policy("ema:initial=2", TIERS)
