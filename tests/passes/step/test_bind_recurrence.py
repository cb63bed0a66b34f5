"""Where the recurrent state of a row stands before and after a step."""

from __future__ import annotations

import torch

from speccompile.passes.step.bind_recurrence import advance

KEPT = 4


def bound(absorbed: int, length: int, first: int, width: int, *, prompt: bool) -> tuple[int, int, int]:
    """Of the row of slot 1: before, after, and what the arena holds afterwards."""
    absorbed_length, lengths = torch.tensor([9, absorbed, 9]), torch.tensor([1, length, 1])
    positions = torch.arange(first, first + width)[None]
    of_prompt, slots = torch.tensor([1, 7, 1]), torch.tensor([1])
    before, after, own = advance(absorbed_length, lengths, of_prompt, slots, positions, prompt=prompt, kept=KEPT)
    assert own.tolist() == [7]
    assert absorbed_length[[0, 2]].tolist() == [9, 9]
    return int(before), int(after), int(absorbed_length[1])


def test_a_decode_step_settles_what_comes_before_its_newest_token() -> None:
    # Three tokens were emitted by the step that began at 5.
    assert bound(5, 9, 8, 4, prompt=False) == (5, 8, 8)
    # It is repeated: nothing is left to absorb.
    assert bound(8, 9, 8, 1, prompt=False) == (8, 8, 8)


def test_a_chunk_settles_the_prompts_tokens_and_no_padding() -> None:
    assert bound(0, 30, 0, 16, prompt=True) == (0, 16, 16)
    assert bound(16, 30, 16, 16, prompt=True) == (16, 30, 30)
    assert bound(0, 1, 0, 4, prompt=True) == (0, 1, 1)


def test_the_first_decode_step_begins_where_the_prompt_ended() -> None:
    assert bound(30, 31, 30, 4, prompt=False) == (30, 30, 30)


def test_the_dummy_slot_stands_within_bounds_whatever_it_holds() -> None:
    for absorbed in (-3, 0, 7, 90):
        for length, first in ((1, 0), (50, 49), (0, 20)):
            for prompt in (False, True):
                before, after, _ = bound(absorbed, length, first, 4, prompt=prompt)
                assert max(0, first - KEPT) <= before <= first <= after <= first + 4
