"""Prompts in chunks, and how much of them is read between two decode steps."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.compiler.layout import PREFILL_WIDTHS, prefill_widths
from speccompile.runtime.prefill import FIXED_TOKENS, LONGEST_WAIT, STEPS, PrefillBudget, next_width
from speccompile.utils.devices import TRAITS

pytestmark = pytest.mark.usefixtures("all_prompt_widths")

WIDTHS = (8, 32, 128, 512)
SOME_WIDTHS = st.sampled_from([PREFILL_WIDTHS, WIDTHS, WIDTHS[:2], WIDTHS[:1]])


def chunk_widths(length: int, widths: Sequence[int]) -> list[int]:
    """Split a prompt of ``length`` tokens into chunks of the given (ascending) ``widths``, the last one padded."""
    chunks = []
    while length > 0:
        chunks.append(next_width(length, widths))
        length -= chunks[-1]
    return chunks


# --- prompts in chunks -------------------------------------------------------------------------------------------


@given(length=st.integers(1, 4000), widths=SOME_WIDTHS)
def test_chunks_cover_the_prompt_and_none_is_superfluous(length: int, widths: tuple[int, ...]) -> None:
    chunks = chunk_widths(length, widths)
    assert set(chunks) <= set(widths)
    assert sum(chunks) >= length
    assert sum(chunks[:-1]) < length
    # What the last chunk is padded with stays small: half of what it holds, or less than the narrowest chunk.
    padding = sum(chunks) - length
    assert padding < widths[0] or padding <= (chunks[-1] - padding) // 2


@given(length=st.integers(1, 4000))
def test_a_length_that_is_a_width_is_one_chunk(length: int) -> None:
    assert (chunk_widths(length, PREFILL_WIDTHS) == [length]) == (length in PREFILL_WIDTHS)


@pytest.mark.parametrize(
    ("length", "chunks"),
    [(1, [8]), (9, [8, 8]), (21, [8, 8, 8]), (22, [32]), (33, [32, 8]), (600, [512, 128]), (1400, [512, 512, 512])],
)
def test_chunks_by_example(length: int, chunks: list[int]) -> None:
    assert chunk_widths(length, WIDTHS) == chunks


@pytest.mark.parametrize(
    ("length", "chunks"), [(1, [4]), (5, [4, 4]), (9, [8, 4]), (11, [16]), (21, [16, 4, 4]), (22, [32]), (40, [32, 8])]
)
def test_chunks_of_the_widths_that_are_built(length: int, chunks: list[int]) -> None:
    assert chunk_widths(length, PREFILL_WIDTHS) == chunks


def test_the_whole_budget_of_a_gpu_is_one_chunk() -> None:
    budget = TRAITS["cuda"].prefill_budget
    assert budget in PREFILL_WIDTHS
    assert PrefillBudget(PREFILL_WIDTHS, budget, fixed=False).next_chunk(1000, []) == budget


@pytest.mark.parametrize(
    ("length", "chunks"), [(1, [4]), (21, [32]), (70, [128]), (129, [128, 4]), (200, [128, 128]), (500, [512])]
)
def test_where_small_chunks_cost_the_same_the_last_one_is_padded(length: int, chunks: list[int]) -> None:
    budget, left, got = PrefillBudget(PREFILL_WIDTHS, 512, fixed=False, flat=128), length, list[int]()
    while left > 0:
        width = budget.next_chunk(left, got)
        assert width is not None
        got.append(width)
        left -= width
    assert got == chunks


@pytest.mark.parametrize(("tokens", "count"), [(512, 4), (300, 2), (24, 1)])
def test_short_prompts_are_charged_what_they_cost(tokens: int, count: int) -> None:
    """Each of them reads all weights, and requests that run wait for it."""
    budget, spent = PrefillBudget(PREFILL_WIDTHS, tokens, fixed=False, flat=128), list[int]()
    while (width := budget.next_chunk(3, spent)) is not None:
        spent.append(width)
    assert spent == [4] * count


@given(max_len=st.integers(2, 5000))
def test_no_prefill_chunk_but_the_smallest_is_wider_than_a_text_can_be(max_len: int) -> None:
    widths = prefill_widths(max_len)
    assert widths == PREFILL_WIDTHS[: len(widths)] and widths
    assert all(width <= max_len for width in widths[1:])
    assert all(width > max_len for width in PREFILL_WIDTHS[len(widths) :])


# --- the budget --------------------------------------------------------------------------------------------------


def between_two_steps(budget: PrefillBudget, length: int) -> list[int]:
    """The chunks of a prompt of ``length`` tokens that are read before the next decode step."""
    spent: list[int] = []
    while sum(spent) < length and (width := budget.next_chunk(length - sum(spent), spent)) is not None:
        spent.append(width)
    return spent


def steps(budget: PrefillBudget, length: int) -> list[list[int]]:
    """The chunks of a whole prompt, decode step by decode step."""
    result: list[list[int]] = []
    while length > 0:
        result.append(between_two_steps(budget, length))
        assert result[-1], "prompts have to get on"
        length -= sum(result[-1])
    return result


def measured(step: float, chunks: dict[int, float], widths: Sequence[int] = WIDTHS) -> PrefillBudget:
    """A budget that has seen steps and chunks take so many seconds."""
    budget = PrefillBudget(widths, None, fixed=False)
    budget.note_step(0, step)
    for width, seconds in chunks.items():
        budget.note_chunk(width, seconds)
    return budget


@given(length=st.integers(1, 4000), widths=SOME_WIDTHS, tokens=st.sampled_from([None, 1, 100]))
def test_nothing_bounds_a_prompt_that_nobody_waits_for(
    length: int, widths: tuple[int, ...], tokens: int | None
) -> None:
    budget = PrefillBudget(widths, tokens, fixed=False)
    budget.note_step(0, 1e-6)
    for width in widths:
        budget.note_chunk(width, 1.0)
    left, chunks = length, []
    while left > 0:
        chunks.append(budget.next_chunk(left, None))
        left -= chunks[-1]
    assert chunks == chunk_widths(length, widths)


@given(length=st.integers(1, 4000), widths=SOME_WIDTHS, tokens=st.integers(1, 1000))
def test_a_budget_in_tokens(length: int, widths: tuple[int, ...], tokens: int) -> None:
    budget = PrefillBudget(widths, tokens, fixed=False)
    left = length
    for spent in steps(budget, length):
        # A chunk of the smallest width goes in any case.
        assert sum(spent) <= max(tokens, widths[0])
        left -= sum(spent)
        # None that still fits is put off.
        assert left <= 0 or sum(spent) + widths[0] > tokens
    assert left <= 0


@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [
        (7, [[8]] * 5),
        (8, [[8]] * 5),
        (17, [[8, 8], [8, 8], [8]]),
        # The largest that fits, and then what still does.
        (40, [[32, 8]]),
        (39, [[32], [8]]),
    ],
)
def test_a_budget_in_tokens_by_example(tokens: int, chunks: list[list[int]]) -> None:
    assert steps(PrefillBudget(WIDTHS, tokens, fixed=False), 40) == chunks


def test_a_measured_budget_by_example() -> None:
    """Steps of 0.13 s: chunks may take 0.13 s before one."""
    assert LONGEST_WAIT == 2.0
    budget = measured(0.13, {8: 0.03, 32: 0.09, 128: 0.2})
    assert between_two_steps(budget, 400) == [32, 8]
    # With longer steps there is room for more.
    assert between_two_steps(measured(0.3, {8: 0.03, 32: 0.09, 128: 0.2}), 400) == [128, 32]
    # A chunk of a prompt's end is no wider than it has to be.
    assert between_two_steps(measured(0.3, {8: 0.03, 32: 0.09, 128: 0.2}), 41) == [32, 8, 8]


seconds = st.floats(1e-5, 1.0)


@given(
    length=st.integers(1, 2000),
    widths=SOME_WIDTHS,
    step=seconds,
    took=st.lists(seconds, min_size=len(PREFILL_WIDTHS), max_size=len(PREFILL_WIDTHS)).map(sorted),
)
@settings(deadline=None)
def test_a_measured_budget_keeps_a_step_with_its_chunks_within_the_longest_wait(
    length: int, widths: tuple[int, ...], step: float, took: list[float]
) -> None:
    of_width = dict(zip(widths, took, strict=False))
    budget = measured(step, of_width, widths)
    left = length
    for spent in steps(budget, length):
        total = sum(of_width[width] for width in spent)
        assert spent == [widths[0]] or step + total <= LONGEST_WAIT * step * (1 + 1e-9)
        left -= sum(spent)
        # None that still fits is put off.
        assert left <= 0 or step + total + of_width[widths[0]] > LONGEST_WAIT * step * (1 - 1e-9)
    assert left <= 0


def test_the_smallest_chunk_is_always_allowed_and_no_second_one() -> None:
    budget = measured(1e-6, {8: 1.0, 32: 1.0})
    assert budget.next_chunk(100, []) == 8
    assert budget.next_chunk(100, [8]) is None
    assert steps(budget, 24) == [[8], [8], [8]]


def test_a_chunk_that_never_ran_is_expected_to_take_as_long_per_token_as_the_next_smaller_one() -> None:
    budget = measured(0.1, {8: 0.01})
    assert [budget.seconds(width) for width in WIDTHS] == pytest.approx([0.01, 0.04, 0.16, 0.64])
    assert between_two_steps(budget, 1000)[0] == 32
    budget.note_chunk(32, 0.02)
    assert [budget.seconds(width) for width in WIDTHS] == pytest.approx([0.01, 0.02, 0.08, 0.32])
    assert between_two_steps(budget, 1000)[0] == 128


def test_before_anything_was_measured_the_smallest_chunk_goes_first() -> None:
    budget = PrefillBudget(WIDTHS, None, fixed=False)
    assert budget.usual_step == 0.0
    assert budget.seconds(8) == 0.0 and budget.seconds(32) == float("inf")
    assert budget.next_chunk(1000, []) == 8
    # A decode step alone does not show what a wider chunk takes.
    budget.note_step(0, 1.0)
    assert budget.next_chunk(1000, []) == 8


def test_one_slow_measurement_changes_nothing_and_old_ones_are_forgotten() -> None:
    budget = measured(0.1, {8: 0.05})
    for _ in range(STEPS - 2):
        budget.note_step(0, 0.1)
    for _ in range(4):
        budget.note_chunk(8, 0.05)
    budget.note_step(0, 30.0)
    budget.note_chunk(8, 30.0)
    assert budget.usual_step == 0.1
    assert budget.seconds(8) == 0.05
    for _ in range(STEPS):
        budget.note_step(0, 0.7)
        budget.note_chunk(8, 0.3)
    assert budget.usual_step == 0.7
    assert budget.seconds(8) == 0.3


@given(
    length=st.integers(1, 2000),
    widths=SOME_WIDTHS,
    tokens=st.none() | st.integers(1, 600),
    seed=st.integers(0, 100),
)
def test_fixed_chunks_depend_on_the_prompt_alone(
    length: int, widths: tuple[int, ...], tokens: int | None, seed: int
) -> None:
    """Neither on time, nor on what else was read: whatever goes on, the same chunks, now or a step later."""
    rng = random.Random(seed)
    most = FIXED_TOKENS if tokens is None else tokens
    fitting = [width for width in widths if width <= most] or [widths[0]]
    busy = PrefillBudget(widths, tokens, fixed=True)
    assert busy.tokens == most
    left, chunks = length, []
    while left > 0:
        busy.note_step(0, rng.random())
        busy.note_chunk(rng.choice(widths), rng.random())
        spent = None if rng.random() < 0.2 else [rng.choice(widths) for _ in range(rng.randint(0, 2))]
        width = busy.next_chunk(left, spent)
        if width is None:
            # It waits for the decode step, and then it is the same one.
            assert spent and sum(spent) + next_width(left, fitting) > most
            width = busy.next_chunk(left, [])
        chunks.append(width)
        left -= width
    assert chunks == chunk_widths(length, fitting)


def test_one_slow_run_does_not_rule_out_a_width() -> None:
    budget = measured(1.0, {8: 0.2, 32: 60.0})
    chunks = []
    while budget.next_chunk(32, []) == 8:
        budget.note_chunk(8, 0.2)
        chunks.append(8)
    assert budget.next_chunk(32, []) == 32
    assert 10 < len(chunks) < 100
