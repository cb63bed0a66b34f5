"""What is wrong with a policy, a list of candidates or a trace is said at wrap or load, before anything is captured."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import speccompile
import speccompile.compiler.attempts
from speccompile.errors import InvalidPolicy, InvalidTrace, UnknownTier
from speccompile.policies import Cost, Done, Ema, Fixed, Gate, Schedule, ScheduleUpTo, parse_policy
from speccompile.tools.policy_lab import Recorder, read_trace
from support.errors import raises

TIERS = (0, 1, 3)


@pytest.fixture(autouse=True)
def nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(*arguments: Any, **options: Any) -> None:
        raise AssertionError("it was captured")

    monkeypatch.setattr(speccompile.compiler.attempts, "build_stages", capture)


@pytest.mark.parametrize(
    ("policy", "tier"),
    [
        ("fixed:2", 2),
        ("schedule:1=3,4=7", 7),
        ("cost:candidates=0/2", 2),
        ("ema:candidates=1:0/3;4:0/5", 5),
        (Gate(draft_len=7), 7),
        (Cost(candidates=(0, 15)), 15),
    ],
)
def test_a_tier_that_is_not_built_is_refused_at_wrap(model: LlamaForCausalLM, policy: Any, tier: int) -> None:
    with raises(UnknownTier, tier=tier, built="0, 1, 3"):
        speccompile.wrap(model, "ngram", tiers=TIERS, max_len=64, backend="eager", policy=policy)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        # Lists of candidates that are empty, unsorted or doubled.
        ("cost:candidates=/", "it must be a list of draft lengths that is not empty"),
        ("ema:candidates=/", "it must be a list of draft lengths that is not empty"),
        ("ema:candidates=3/1/0", "draft lengths must ascend, without repetition"),
        ("cost:candidates=0/3/3", "draft lengths must ascend, without repetition"),
        ("ema:candidates=1:0/1;4:1/0", "draft lengths must ascend"),
        ("ema:candidates=1:0/1;1:0/3", "has an entry for the same number of rows twice"),
        ("ema:candidates=0//3", "'' is not a number"),
        # What one policy takes by rows, another one does not.
        ("cost:candidates=1:0/3", "it must be one list of draft lengths"),
    ],
)
def test_candidates_that_are_not_valid_are_refused_at_wrap(model: LlamaForCausalLM, policy: str, reason: str) -> None:
    with raises(InvalidPolicy, reason=re.compile(reason)):
        speccompile.wrap(model, "ngram", tiers=TIERS, max_len=64, backend="eager", policy=policy)


HUGE = "7" * 10_000


@pytest.mark.parametrize(
    "made",
    [
        lambda: Fixed(HUGE),  # type: ignore[arg-type]
        lambda: Fixed(-(10**5000)),
        lambda: Ema(alpha=HUGE),  # type: ignore[arg-type]
        lambda: Ema(down={rows: 0.0 for rows in range(2, 5000)}),
        lambda: Cost(candidates=tuple(range(5000, 0, -1))),
        lambda: Schedule(HUGE),  # type: ignore[arg-type]
        lambda: Schedule(((HUGE, 1),)),  # type: ignore[arg-type]
        lambda: Schedule(((2, 10**5000),)),
        lambda: parse_policy(HUGE, TIERS),
        lambda: parse_policy(f"fixed:{HUGE}", TIERS),
        lambda: parse_policy(f"ema:{HUGE}", TIERS),
        lambda: parse_policy(f"ema:alpha=x{HUGE}", TIERS),
        lambda: parse_policy("ema:down=" + "1:2;" * 5000 + "1:2", TIERS),
        lambda: parse_policy("schedule:1=x" + HUGE, TIERS),
    ],
)
def test_an_error_shows_the_beginning_of_a_huge_value(made: Callable[[], object]) -> None:
    with raises(InvalidPolicy) as error:
        made()
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("candidates", [(), (3, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("policy", [Ema, Cost])
def test_candidates_are_refused_before_there_is_a_wrap(policy: type[Ema | Cost], candidates: tuple[int, ...]) -> None:
    with raises(InvalidPolicy, reason=re.compile("candidates=")):
        policy(candidates=candidates)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Fixed("3"), "draft_len='3' must be a whole number"),  # type: ignore[arg-type]
        (lambda: Fixed(-1), "draft_len=-1 must be a whole number"),
        (lambda: Schedule(()), "begin with 1=K"),
        (lambda: Schedule(((2, 3),)), "begin with 1=K"),
        (lambda: Schedule(((1, 3), (4, 1), (4, 0))), "must ascend"),
        (lambda: Schedule(((1, 3.0),)), "must be a whole number"),  # type: ignore[arg-type]
        (lambda: Schedule({1: 3}), "must be pairs"),  # type: ignore[arg-type]
        (lambda: Schedule(((1,),)), "must be pairs"),  # type: ignore[arg-type]
        (lambda: Schedule("1=3"), "must be pairs"),  # type: ignore[arg-type]
        (lambda: ScheduleUpTo(()), "begin with <=ROWS=K for"),
        (lambda: ScheduleUpTo(((0, 3),)), "at least 1"),
        (lambda: ScheduleUpTo({4: 3}), "must be pairs"),  # type: ignore[arg-type]
    ],
)
def test_simple_policies_are_checked_however_they_are_made(make: Callable[[], object], reason: str) -> None:
    with raises(InvalidPolicy, reason=re.compile(reason)):
        make()


def test_a_trace_of_another_ladder(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.jsonl", TIERS, None, ready=True)
    recorder.add(Done(3, (0,), (10,), (3,), (1,), (2,)), [3])
    recorder.close()
    assert read_trace(tmp_path / "run.jsonl", (0, 3)).draft_lens == TIERS
    with raises(InvalidTrace, reason=re.compile(r"recorded with tiers \[0, 1, 3\], and has no drafts after the")):
        read_trace(tmp_path / "run.jsonl", (0, 7))
