"""The joined ops are what passes insert elsewhere as several."""

from __future__ import annotations

from typing import Any

import torch

from speccompile.ops import step_inputs as inputs_op
from speccompile.ops import store_drafts as store_op
from speccompile.ops.step_inputs import newest_and_drafts
from speccompile.passes.step.drafts import limited_drafts, no_drafts, proposed_drafts, useful_lens
from support.input_cases import LONGEST, input_cases, stored_cases


def spelled(
    tokens: Any, length: Any, slots: Any, drafts: Any, lens: Any, limit: Any, most: Any, draft_len: int, *sizes: int
) -> tuple[torch.Tensor, ...]:
    """By the functions of the passes, one after the other."""
    if drafts is None:
        drafts, lens = no_drafts(slots)
    elif limit is not None:
        drafts, lens = proposed_drafts(drafts, lens, length, limit, slots, draft_len=draft_len)
    else:
        drafts = torch.where(torch.arange(draft_len) < lens[:, None], drafts, -1)
    if most is not None:
        drafts, lens = limited_drafts(drafts, lens, most, slots)
    width, vocab_size = sizes
    return drafts, lens, *newest_and_drafts(tokens, length, slots, drafts, width=width, vocab_size=vocab_size)


def test_step_inputs_are_those_of_the_passes() -> None:
    for case in input_cases():
        for one, other in zip(inputs_op.reference(*case), spelled(*case), strict=True):  # type: ignore[arg-type]
            assert one.dtype is other.dtype and torch.equal(one, other)


def test_stored_drafts_are_those_of_the_pass() -> None:
    for case in stored_cases():
        own, (tokens, lens, length, limit, slots, drafts, count) = [item.clone() for item in case], case
        store_op.reference(*own)
        tokens.index_put_((slots,), drafts)
        lens.index_put_((slots,), useful_lens(count.clamp(max=LONGEST), length[slots], limit[slots]))
        assert torch.equal(own[0], tokens) and torch.equal(own[1], lens)


def test_its_fake_has_the_same_shapes() -> None:
    for case in input_cases():
        with torch.device("meta"):
            found = inputs_op._fake(*[item.to("meta") if isinstance(item, torch.Tensor) else item for item in case])
        wanted = inputs_op.reference(*case)  # type: ignore[arg-type]
        assert [tuple(item.shape) for item in found] == [tuple(item.shape) for item in wanted]
