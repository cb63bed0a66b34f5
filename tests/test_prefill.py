"""Prompts in chunks, and how much of them is read between two decode steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import admitted, cancel_all, tiny_llama
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.lowering.tier import Tier
from speccompile.pipelines import PREFILL_WIDTHS, prefill_widths
from speccompile.runtime.prefill import FIXED_TOKENS, LONGEST_WAIT, STEPS, PrefillBudget, chunk_widths, next_width

VOCAB = 128
MAX_LEN = 256
WIDTHS = (8, 32, 128, 512)
SOME_WIDTHS = st.sampled_from([PREFILL_WIDTHS, WIDTHS, WIDTHS[:2], WIDTHS[:1]])


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
    budget.note_step(step)
    for width, seconds in chunks.items():
        budget.note_chunk(width, seconds)
    return budget


@given(length=st.integers(1, 4000), widths=SOME_WIDTHS, tokens=st.sampled_from([None, 1, 100]))
def test_nothing_bounds_a_prompt_that_nobody_waits_for(
    length: int, widths: tuple[int, ...], tokens: int | None
) -> None:
    budget = PrefillBudget(widths, tokens, fixed=False)
    budget.note_step(1e-6)
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
    """Steps of 0.1 s: chunks may take 0.12 s in front of one."""
    assert LONGEST_WAIT == 2.2
    budget = measured(0.1, {8: 0.03, 32: 0.09, 128: 0.2})
    assert between_two_steps(budget, 400) == [32, 8]
    # With longer steps there is room for more.
    assert between_two_steps(measured(0.25, {8: 0.03, 32: 0.09, 128: 0.2}), 400) == [128, 32]
    # A chunk of a prompt's end is no wider than it has to be.
    assert between_two_steps(measured(0.25, {8: 0.03, 32: 0.09, 128: 0.2}), 41) == [32, 8, 8]


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
    # A decode step alone does not tell what a wider chunk takes.
    budget.note_step(1.0)
    assert budget.next_chunk(1000, []) == 8


def test_one_slow_measurement_changes_nothing_and_old_ones_are_forgotten() -> None:
    budget = measured(0.1, {8: 0.05})
    for _ in range(STEPS - 2):
        budget.note_step(0.1)
    for _ in range(4):
        budget.note_chunk(8, 0.05)
    budget.note_step(30.0)
    budget.note_chunk(8, 30.0)
    assert budget.usual_step == 0.1
    assert budget.seconds(8) == 0.05
    for _ in range(STEPS):
        budget.note_step(0.7)
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
        busy.note_step(rng.random())
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


# --- in an engine ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=VOCAB)


def wrap(model: LlamaForCausalLM, **options: Any) -> Speculator:
    """Every prompt is read."""
    return speccompile.wrap(
        model, "none", **({"tiers": (0,), "max_batch": 3, "max_len": MAX_LEN, "backend": "eager"} | options)
    )


@pytest.fixture(scope="module")
def shared(model: LlamaForCausalLM) -> Speculator:
    return wrap(model, prefill_budget=24, prefix_reuse=False)


@pytest.fixture
def spec(shared: Speculator) -> Iterator[Speculator]:
    yield shared
    cancel_all(shared.engine)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the executables that were run, in order, noted outside of the engine."""
    names: list[str] = []
    run = Tier.run

    def noted(self: Tier) -> None:
        names.append(self.name)
        run(self)

    monkeypatch.setattr(Tier, "run", noted)
    return names


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(model: LlamaForCausalLM, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    return model.generate(ids, max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()


def names_by_step(spec: Speculator, runs: list[str]) -> list[list[str]]:
    """What ran, step by step, until nothing is left to do."""
    result = []
    while not spec.engine.idle:
        runs.clear()
        spec.engine.step()
        names = [name.removeprefix("prefill ").removeprefix("tier ") for name in runs]
        result.append([name.removesuffix(", inner") for name in names])
    return result


def test_while_nobody_runs_a_step_reads_one_chunk_and_runs_no_tier(spec: Speculator, runs: list[str]) -> None:
    spec.engine.submit(prompt(200), max_new_tokens=3)
    assert names_by_step(spec, runs) == [["T=128"], ["T=64"], ["T=8"], ["K=0, 1 row"], ["K=0, 1 row"]]


def test_a_running_request_gets_a_token_with_every_step(
    spec: Speculator, model: LlamaForCausalLM, runs: list[str]
) -> None:
    running = admitted(spec.engine, prompt(5, seed=1), max_new_tokens=9)
    late = spec.engine.submit(prompt(70, seed=2), max_new_tokens=3)
    assert names_by_step(spec, runs) == [
        ["T=16", "T=8", "K=0, 1 row"],
        ["T=16", "T=8", "K=0, 1 row"],
        ["T=16", "T=8", "K=0, 2 rows"],
        ["K=0, 2 rows"],
        *[["K=0, 1 row"]] * 4,
    ]
    for request, new in ((running, 9), (late, 3)):
        assert request.new_tokens == greedy(model, request.prompt, new)
        assert request.stats.prefill_tokens == len(request.prompt)


def test_the_budget_is_shared_by_all_prompts_of_a_step(spec: Speculator, runs: list[str]) -> None:
    admitted(spec.engine, prompt(5, seed=1), max_new_tokens=3)
    for seed in (2, 3):
        spec.engine.submit(prompt(16, seed), max_new_tokens=1)
    assert names_by_step(spec, runs) == [["T=16", "T=8", "K=0, 1 row"], ["T=8", "K=0, 1 row"]]


def test_prompts_of_generate_are_read_before_any_of_them_goes_on(spec: Speculator, runs: list[str]) -> None:
    """Nobody watches their tokens come, and together they are done sooner."""
    rows = torch.tensor([prompt(40, seed) for seed in (4, 5, 6)])
    spec.generate(rows, max_new_tokens=3)
    assert runs == ["prefill T=32, inner", "prefill T=8"] * 3 + ["tier K=0, 3 rows"] * 2


def test_prompts_of_generate_do_not_hold_up_who_is_watched(
    spec: Speculator, model: LlamaForCausalLM, runs: list[str]
) -> None:
    watched = admitted(spec.engine, prompt(5, seed=1), max_new_tokens=30)
    runs.clear()
    rows = torch.tensor([prompt(40, seed) for seed in (4, 5)])
    spec.generate(rows, max_new_tokens=3)
    assert runs[:6] == [
        *("prefill T=16, inner", "prefill T=8, inner", "tier K=0, 1 row"),
        *("prefill T=16", "prefill T=8, inner", "tier K=0, 2 rows"),
    ]
    spec.engine.run()
    assert watched.new_tokens == greedy(model, watched.prompt, 30)


def test_deterministic_chunks_are_the_same_alone_and_among_others(model: LlamaForCausalLM, runs: list[str]) -> None:
    spec = wrap(model, deterministic=True)
    assert spec.engine.prefill_budget.tokens == FIXED_TOKENS == 64
    text = prompt(150, seed=7)
    spec.engine.submit(text, max_new_tokens=2)
    alone = names_by_step(spec, runs)
    assert alone == [["T=64"], ["T=64"], ["T=32"], ["K=0, 3 rows"]]
    others = [admitted(spec.engine, prompt(5, seed), max_new_tokens=40) for seed in (1, 2)]
    among = spec.engine.submit(text, max_new_tokens=2)
    step = "K=0, 3 rows"
    assert names_by_step(spec, runs)[:3] == [["T=64", step], ["T=64", step], ["T=32", step]]
    assert among.new_tokens == greedy(model, text, 2)
    assert all(len(request.new_tokens) == 40 for request in others)


def test_a_measured_budget_follows_what_is_measured(
    model: LlamaForCausalLM, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = wrap(model, prefix_reuse=False)
    engine = spec.engine
    assert engine.prefill_budget.tokens is None
    running = admitted(engine, prompt(5, seed=1), max_new_tokens=60)
    for step_seconds, allowed in ((10.0, "T=128"), (1e-9, "T=4, inner")):
        for _ in range(STEPS):
            engine.prefill_budget.note_step(step_seconds)
        for width in spec.prefill:
            for _ in range(STEPS):
                engine.prefill_budget.note_chunk(width, 0.01)
        late = engine.submit(prompt(128, seed=int(step_seconds)), max_new_tokens=1)
        runs.clear()
        engine.step()
        assert runs == [f"prefill {allowed}", "tier K=0, 1 row"]
        late.cancel()
    noted: list[tuple[float, ...]] = []
    for name in ("note_step", "note_chunk"):
        monkeypatch.setattr(engine.prefill_budget, name, lambda *measured: noted.append(measured))
    engine.submit(prompt(4, seed=11), max_new_tokens=1)
    engine.step()
    (width, chunk_seconds), (step_seconds,) = noted
    assert width == 4
    assert min(chunk_seconds, step_seconds) > 1e-6
    engine.run()
    assert running.new_tokens == greedy(model, running.prompt, 60)


def test_one_slow_run_does_not_rule_out_a_width() -> None:
    budget = measured(1.0, {8: 0.2, 32: 60.0})
    chunks = []
    while budget.next_chunk(32, []) == 8:
        budget.note_chunk(8, 0.2)
        chunks.append(8)
    assert budget.next_chunk(32, []) == 32
    assert 10 < len(chunks) < 100
