"""``generate`` takes and returns what transformers' ``generate`` takes and returns."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.errors import InvalidInput, OutputTruncated, TooManyEosTokens
from support.errors import raises
from support.recorder import Recorder

VOCAB = 128
PAD = 7
MAX_LEN = 64
TINY = {}


@pytest.fixture(scope="module")
def shared(model: LlamaForCausalLM) -> Speculator:
    # The whole model drafts, so every step emits several tokens and is cut where a row ends.
    options: dict[str, Any] = {"tiers": (0, 3), "max_batch": 4, "max_len": MAX_LEN, "backend": "eager"}
    return speccompile.wrap(model, "early_exit", exit_layer=2, **options)


@pytest.fixture
def spec(shared: Speculator, model: LlamaForCausalLM) -> Iterator[Speculator]:
    before = model.generation_config.to_dict()
    shared.set_tier(3)
    yield shared
    model.generation_config.update(**before)


def rows(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Prompts without the pad id."""
    generator = torch.Generator().manual_seed(seed)
    ids = [token for token in range(VOCAB) if token != PAD]
    return [[ids[i] for i in torch.randint(len(ids), (n,), generator=generator).tolist()] for n in lengths]


def left_padded(prompts: list[list[int]], pad: int = PAD) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def both(
    model: LlamaForCausalLM, spec: Speculator, ids: torch.Tensor, mask: torch.Tensor | None = None, **arguments: Any
) -> torch.Tensor:
    """Our output, which is transformers' output for the same arguments, as a whole tensor."""
    got = spec.generate(ids, mask, **arguments)
    expected = model.generate(ids, attention_mask=mask, do_sample=False, **arguments)
    assert got.dtype == torch.int64
    assert torch.equal(got, expected), f"{got.tolist()} instead of {expected.tolist()}"
    return got


def plain(model: LlamaForCausalLM, ids: torch.Tensor, mask: torch.Tensor, new: int) -> torch.Tensor:
    """New tokens of all rows, none of which ends."""
    output = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=PAD)
    return output[:, ids.shape[1] :]


# --- padding in --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool, torch.float32])
def test_left_padding_with_a_mask(model: LlamaForCausalLM, spec: Speculator, kind: torch.dtype) -> None:
    ids, mask = left_padded(rows(3, 9, 1, 6))
    got = spec.generate(ids, mask.to(kind), max_new_tokens=12)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=PAD)
    assert torch.equal(got, expected)
    assert torch.equal(got[:, :9], ids), "the prompts come back with their padding"


def test_the_mask_wins_over_the_pad_id(model: LlamaForCausalLM, spec: Speculator) -> None:
    """A pad id that the mask keeps is a token like any other."""
    ids = torch.tensor([[PAD, PAD, 5, PAD, 9]])
    kept = both(model, spec, ids, torch.ones_like(ids), max_new_tokens=12, pad_token_id=PAD)
    cut = both(model, spec, ids, torch.tensor([[0, 1, 1, 1, 1]]), max_new_tokens=12, pad_token_id=PAD)
    assert not torch.equal(kept, cut)


def test_without_a_mask_the_pad_id_marks_padding(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids, mask = left_padded(rows(3, 9, 6))
    got = both(model, spec, ids, max_new_tokens=12, pad_token_id=PAD)
    assert torch.equal(got, spec.generate(ids, mask, max_new_tokens=12))
    # The generation_config's pad id does as well.
    model.generation_config.pad_token_id = PAD
    assert torch.equal(both(model, spec, ids, max_new_tokens=12), got)


def test_without_a_mask_or_a_pad_id_all_is_text(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids, mask = left_padded(rows(3, 9, 6))
    got = both(model, spec, ids, max_new_tokens=12)
    assert not torch.equal(got, spec.generate(ids, mask, max_new_tokens=12))


def test_a_pad_id_that_is_an_eos_id_marks_nothing(model: LlamaForCausalLM, spec: Speculator) -> None:
    """As in transformers: padding and the end of a text could not be distinguished."""
    ids, mask = left_padded(rows(3, 9, 6))
    got = both(model, spec, ids, max_new_tokens=12, pad_token_id=PAD, eos_token_id=PAD)
    assert not torch.equal(got, spec.generate(ids, mask, max_new_tokens=12, eos_token_id=PAD, pad_token_id=PAD))


@pytest.mark.parametrize("masked", [[2], [1, 4, 5], [0, 3]])
def test_masked_tokens_between_others_are_left_out(
    model: LlamaForCausalLM, spec: Speculator, masked: list[int]
) -> None:
    ids, mask = left_padded(rows(8, 3))
    mask[0, masked] = 0
    both(model, spec, ids, mask, max_new_tokens=12, pad_token_id=PAD)
    # A pad id in a prompt without a mask is masked, too.
    ids[0, masked] = PAD
    both(model, spec, ids, max_new_tokens=12, pad_token_id=PAD)


def test_padding_after_the_tokens_is_left_out_with_a_warning(spec: Speculator) -> None:
    """transformers would continue from the padding."""
    ids, mask = left_padded(rows(8, 3))
    expected = spec.generate(ids, mask, max_new_tokens=12)[:, 8:]
    right = torch.stack([ids[0], ids[1].roll(3)])
    for given in ({"attention_mask": mask.flip(1)}, {"pad_token_id": PAD}):
        with pytest.warns(UserWarning, match=r"rows \[1\] have padding after their last token.*padding_side = 'left'"):
            got = spec.generate(right, max_new_tokens=12, **given)
        assert torch.equal(got, torch.cat([right, expected], dim=1))


def test_a_prompt_of_padding_alone_is_refused(spec: Speculator) -> None:
    with raises(InvalidInput, name="input_ids", reason=re.compile(f"row 1 only has the pad token {PAD}")):
        spec.generate(torch.tensor([[1, 2], [PAD, PAD]]), pad_token_id=PAD)


@pytest.mark.parametrize("kept", [2, -1, 0.5, float("nan")])
def test_a_mask_of_other_values_is_refused(spec: Speculator, kept: float) -> None:
    with raises(InvalidInput, name="attention_mask", reason=re.compile("1 at tokens and 0 at padding")):
        spec.generate(torch.tensor([[1, 2, 3]]), torch.tensor([[0, kept, kept]]))


def test_int32_prompts_give_the_text_of_int64_ones(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids, mask = left_padded(rows(3, 9))
    expected = both(model, spec, ids, mask, max_new_tokens=12, pad_token_id=PAD)
    got = spec.generate(ids.int(), mask, max_new_tokens=12)
    assert got.dtype == torch.int64
    assert torch.equal(got, expected)


def test_the_input_is_left_as_it_was(spec: Speculator) -> None:
    ids, mask = left_padded(rows(3, 9))
    before = ids.clone(), mask.clone()
    got = spec.generate(ids, mask, max_new_tokens=4)
    got.zero_()
    assert torch.equal(ids, before[0])
    assert torch.equal(mask, before[1])


# --- padding out, and ends ---------------------------------------------------------------------------------------


def test_rows_that_end_early_are_padded_behind(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids, mask = left_padded(rows(3, 9, 6))
    new = plain(model, ids, mask, 20)
    eos = int(new[1, 4])
    got = both(model, spec, ids, mask, max_new_tokens=20, eos_token_id=eos, pad_token_id=PAD)
    ended = got[1, 9 + new[1].tolist().index(eos) + 1 :]
    assert len(ended) > 0
    assert (ended == PAD).all()


def test_without_a_pad_id_the_first_eos_id_pads(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids, mask = left_padded(rows(3, 9, 6))
    new = plain(model, ids, mask, 20)
    eos = [int(new[1, 4]), int(new[0, 2])]
    got = both(model, spec, ids, mask, max_new_tokens=20, eos_token_id=eos)
    assert got[0, -1] == got[1, -1] == eos[0]
    assert got[0, 9 + 2] == eos[1]


def test_several_eos_ids(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids, mask = left_padded(rows(5, 5, 5, 5, seed=1))
    new = plain(model, ids, mask, 20)
    eos = [int(new[row, 3 + 2 * row]) for row in range(3)]
    got = both(model, spec, ids, mask, max_new_tokens=20, eos_token_id=eos, pad_token_id=PAD)
    assert (got[:3, -1] == PAD).all()
    assert [request.finish_reason for request in spec.stats.requests][:3] == ["eos"] * 3
    # A tensor and a tuple say the same.
    for form in (torch.tensor(eos), tuple(eos)):
        again = spec.generate(ids, mask, max_new_tokens=20, eos_token_id=form, pad_token_id=PAD)
        assert torch.equal(again, got)


def test_the_output_is_as_wide_as_its_longest_row(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids, mask = left_padded(rows(5, 5))
    new = plain(model, ids, mask, 20)
    eos = [int(new[0, 2]), int(new[1, 5])]
    got = both(model, spec, ids, mask, max_new_tokens=20, eos_token_id=eos, pad_token_id=PAD)
    assert got.shape[1] < 5 + 20


def test_eos_ids_of_the_generation_config(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids, mask = left_padded(rows(5))
    new = plain(model, ids, mask, 20)
    model.generation_config.eos_token_id = [int(new[0, 6])]
    got = both(model, spec, ids, mask, max_new_tokens=20, pad_token_id=PAD)
    assert got.shape[1] == 5 + new[0].tolist().index(int(new[0, 6])) + 1
    # An argument takes their place.
    both(model, spec, ids, mask, max_new_tokens=20, eos_token_id=int(new[0, 3]), pad_token_id=PAD)


def test_an_eos_id_in_the_prompt_ends_nothing(model: LlamaForCausalLM, spec: Speculator) -> None:
    (prompt,) = rows(6)
    got = both(model, spec, *left_padded([prompt]), max_new_tokens=5, eos_token_id=prompt[-1], pad_token_id=PAD)
    assert got.shape[1] > 6


def test_as_many_eos_ids_as_a_slot_can_hold(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids, mask = left_padded(rows(5))
    new = plain(model, ids, mask, 20)[0].tolist()
    never = [token for token in range(VOCAB) if token not in new]
    got = both(model, spec, ids, mask, max_new_tokens=20, eos_token_id=[*never[:7], new[4]], pad_token_id=PAD)
    assert got.shape[1] == 5 + new.index(new[4]) + 1
    with raises(TooManyEosTokens, count=9, capacity=8):
        spec.generate(ids, mask, eos_token_id=[*never[:8], new[4]])


def test_one_new_token_is_transformers_own(model: LlamaForCausalLM, spec: Speculator) -> None:
    assert both(model, spec, *left_padded(rows(3, 9)), max_new_tokens=1, pad_token_id=PAD).shape == (2, 10)


# --- the end of the arena ----------------------------------------------------------------------------------------


def test_a_row_that_reaches_max_len_warns(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids, mask = left_padded(rows(MAX_LEN - 4, 10))
    with pytest.warns(OutputTruncated, match=r"rows \[0\] ended at max_len=64.*larger max_len") as caught:
        got = spec.generate(ids, mask, max_new_tokens=20, pad_token_id=PAD)
    assert [warning.filename for warning in caught] == [__file__], "the warning points at the caller"
    new = plain(model, ids, mask, 20)
    assert torch.equal(got[1, ids.shape[1] :], new[1])
    assert got[0, ids.shape[1] :].tolist() == new[0, :4].tolist() + [PAD] * 16


def test_a_row_that_just_fits_does_not_warn(spec: Speculator) -> None:
    ids, mask = left_padded(rows(MAX_LEN - 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spec.generate(ids, mask, max_new_tokens=4).shape == (1, MAX_LEN)


# --- streamers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [1, 2, 25])
@pytest.mark.parametrize("tier", [0, 3])
def test_a_streamer_receives_what_it_does_in_transformers(
    model: LlamaForCausalLM, spec: Speculator, new: int, tier: int
) -> None:
    spec.set_tier(tier)
    ids = torch.tensor(rows(6))
    ours, theirs = Recorder(), Recorder()
    spec.generate(ids, max_new_tokens=new, streamer=ours)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, streamer=theirs)
    assert ours.received == theirs.received
    assert len(ours.received) == 1 + new + 1


def test_a_streamer_sees_the_eos_and_nothing_behind_it(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids, mask = left_padded(rows(6))
    eos = int(plain(model, ids, mask, 12)[0, 5])
    ours, theirs = Recorder(), Recorder()
    spec.generate(ids, mask, max_new_tokens=12, eos_token_id=eos, streamer=ours)
    model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=eos, streamer=theirs)
    assert ours.received == theirs.received
    assert ours.received[-2:] == [(torch.int64, [eos]), "end"]
