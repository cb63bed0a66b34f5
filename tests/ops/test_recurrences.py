"""Recurrence ops: over any steps what they compute place by place, and nothing of what was rejected."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers.models.kimi_linear.modeling_kimi_linear as kimi
import transformers.models.mamba.modeling_mamba as mamba
import transformers.models.mamba2.modeling_mamba2 as mamba2
import transformers.models.qwen3_next.modeling_qwen3_next as qwen3_next

from speccompile.ops.cpu.library import load_cpu_ops
from support.recurrences import (
    FORMS,
    OPS,
    PROBLEMS,
    WIDEST,
    Problem,
    Slots,
    causal_conv,
    gated_delta_rule,
    selective_scan,
)

assert load_cpu_ops("recurrence") is None

EACH_PROBLEM = pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS.keys())
EACH_FORM = pytest.mark.parametrize("form", FORMS, ids=["reference", "C++"])


def whole(problem: Problem, form: str) -> tuple[torch.Tensor, Slots]:
    """The text of each row at once, and the slots after it."""
    slots, rows = Slots(problem, form), problem.places[0].shape[0]
    ends = [problem.length] * rows
    return slots.step(problem.places, list(range(rows)), [0] * rows, [0] * rows, ends), slots


def cut(problem: Problem, row: int, first: int, width: int) -> list[torch.Tensor]:
    """A copy of the places ``first`` and after it."""
    return [item[row : row + 1, first : first + width].clone() for item in problem.places]


def plain(problem: Problem, form: str, row: int = 0) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Token by token: results ``[L, ...]``, and the slot's state before each token."""
    slots, results, states = Slots(problem, form), [], []
    for place in range(problem.length):
        results.append(slots.step(cut(problem, row, place, 1), [0], [place], [max(0, place - 1)], [place])[0, 0])
        states.append(slots.of(0, place))
    return torch.stack(results), states


@EACH_FORM
@EACH_PROBLEM
def test_a_text_at_once_and_token_by_token_have_the_same_bits(make: Any, form: str) -> None:
    problem = make()
    for row in range(2):
        assert torch.equal(whole(problem, form)[0][row], plain(problem, form, row)[0])


@EACH_FORM
@EACH_PROBLEM
@pytest.mark.parametrize("seed", range(4))
def test_state_after_any_steps_is_that_of_plain_decoding(make: Any, form: str, seed: int) -> None:
    """A prompt in padded chunks, then steps of random widths, of which some drafts are accepted. Rejected ones are
    NaN."""
    choose, problem = random.Random(seed), make(length=40, seed=seed)
    expected, states = plain(problem, form)
    slots, prompt, absorbed, first = Slots(problem, form), choose.randint(1, 12), 0, 0
    while first < prompt:
        width = choose.choice([2, 4, 16])
        places = cut(problem, 0, first, width)
        for item in places:
            item[:, prompt - first :] = torch.nan
        result = slots.step(places, [2], [first], [absorbed], [min(prompt, first + width)])
        read = min(width, prompt - first)
        assert torch.equal(result[0, :read], expected[first : first + read])
        absorbed = first = min(prompt, first + width)
    while first < problem.length - WIDEST:
        width = choose.randint(1, WIDEST)
        places, accepted = cut(problem, 0, first, width), choose.randint(1, width)
        for item in places:
            item[:, accepted:] = torch.nan
        result = slots.step(places, [2], [first], [absorbed], [first])
        assert torch.equal(result[0, :accepted], expected[first : first + accepted])
        assert all(map(torch.equal, slots.of(2, first), states[first]))
        # A step whose first token could not be chosen is repeated.
        absorbed, first = first, first + choose.choice([accepted, 0])


@EACH_PROBLEM
def test_the_kernel_computes_the_reference(make: Any) -> None:
    problem = make()
    (expected, known), (found, slots) = (whole(problem, form) for form in FORMS)
    torch.testing.assert_close(found, expected)
    for row in range(2):
        torch.testing.assert_close(slots.of(row, problem.length), known.of(row, problem.length))
    assert slots.state is None or slots.state[2].isnan().all(), "a slot that no row has was written"


@EACH_FORM
@EACH_PROBLEM
def test_rows_do_not_see_one_another(make: Any, form: str) -> None:
    """The row beside it is NaN, and further on in its own text."""
    problem = make()
    expected = plain(problem, form)[0]
    slots = Slots(problem, form)
    slots.step(cut(problem, 0, 0, 7), [1], [0], [0], [7])
    places = [torch.cat([item[:1, 7:10], torch.full_like(item[:1, 7:10], torch.nan)]) for item in problem.places]
    result = slots.step(places, [1, 0], [7, 2], [7, 0], [7, 2])
    assert torch.equal(result[0], expected[7:10])


@EACH_FORM
@pytest.mark.parametrize(("absorbed", "settled"), [(8, 7), (7 - WIDEST - 1, 7), (7, 6), (7, 10), (-1, 7)])
def test_a_state_at_an_impossible_place_is_refused(form: str, absorbed: int, settled: int) -> None:
    problem = selective_scan()
    with pytest.raises(RuntimeError, match=f"row 0 at position 7: its state has absorbed {absorbed} tokens"):
        Slots(problem, form).step(cut(problem, 0, 7, 2), [0], [7], [absorbed], [settled])


@EACH_FORM
def test_the_convolution_is_that_of_transformers(form: str) -> None:
    problem = causal_conv()
    (x,), (weight, bias) = problem.places, problem.fixed
    own = qwen3_next.causal_conv1d_fn(x.transpose(1, 2), weight, bias).transpose(1, 2)
    torch.testing.assert_close(whole(problem, form)[0], own)


@EACH_FORM
def test_the_gated_delta_rule_is_that_of_transformers(form: str) -> None:
    problem = gated_delta_rule()
    q, k, v, gate, beta = problem.places
    # Their layers repeat queries and keys before the call in the oldest supported version, as this does.
    wide = [item.repeat_interleave(2, dim=2) for item in (q, k)]
    own, state = qwen3_next.torch_recurrent_gated_delta_rule(*wide, v, gate[..., 0], beta, output_final_state=True)
    # Theirs scales the queries.
    found, slots = whole(problem, form)
    torch.testing.assert_close(found * q.shape[-1] ** -0.5, own)
    torch.testing.assert_close(slots.state[:2], state)  # type: ignore[index]


@EACH_FORM
def test_the_delta_rule_with_a_gate_for_each_channel_is_that_of_transformers(form: str) -> None:
    problem = gated_delta_rule(each_channel=True)
    q, k, v, gate, beta = problem.places
    wide = [item.repeat_interleave(2, dim=2) for item in (q, k)]
    own, _ = kimi.recurrent_kimi_delta_attention(*wide, v, gate, beta, None, False)
    torch.testing.assert_close(whole(problem, form)[0] * q.shape[-1] ** -0.5, own)


@EACH_FORM
def test_the_scan_of_heads_is_that_of_transformers(form: str) -> None:
    problem = selective_scan()
    (x, dt, b, c), (decay,) = problem.places, problem.fixed
    own, state = mamba2.mamba2_chunk_scan(x, dt, decay[:, 0], b, c, 8, return_final_states=True)  # type: ignore[index]
    found, slots = whole(problem, form)
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(slots.state[:2], state, rtol=1e-4, atol=1e-5)  # type: ignore[index]


@EACH_FORM
def test_the_scan_of_channels_is_that_of_transformers(form: str) -> None:
    problem = selective_scan(each_channel=True)
    (x, dt, b, c), (decay,) = problem.places, problem.fixed
    flat = [item.transpose(1, 2) for item in (x[..., 0], dt)]
    own = mamba.mamba_selective_scan(*flat, decay, *[item[:, :, 0].transpose(1, 2) for item in (b, c)])
    torch.testing.assert_close(whole(problem, form)[0][..., 0].transpose(1, 2), own)


@pytest.mark.parametrize("form", FORMS)
def test_fakes_have_the_shapes_of_results(form: str) -> None:
    from speccompile.graph.fakes import faking

    for make in PROBLEMS.values():
        problem = make()
        expected = whole(problem, form)[0]
        with faking():
            given = [None if item is None else torch.empty(item.shape) for item in (*problem.places, *problem.fixed)]
            state = [] if problem.state is None else [torch.empty(3, *problem.state)]
            numbers = [torch.empty(2, dtype=torch.int64) for _ in "sas"]
            op = getattr(OPS, f"{form}{problem.op}_")
            stands = numbers[:1] * (problem.state is not None)
            positions = torch.empty(2, problem.length, dtype=torch.int64)
            arguments = [given[index] for index in problem.order]
            fake = op(*arguments, *state, torch.empty(3, *problem.kept), numbers[0], positions, *stands, numbers[1])
        assert (fake.shape, fake.dtype, fake.stride()) == (expected.shape, expected.dtype, expected.stride())
