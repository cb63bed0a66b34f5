"""generate, on top of an engine that others use too."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, MaxLengthCriteria, PreTrainedTokenizerFast, StoppingCriteriaList

from speccompile import Speculator
from speccompile.errors import (
    InvalidInput,
    InvalidOption,
    UnknownOption,
)
from support.engines import MAX_BATCH, PAD, PATIENCE, VOCAB, Make, NoStreamer, greedy, prompt, serving, threads
from support.errors import raises
from support.recorder import Recorder

# --- generate beside others ----------------------------------------------------------------------


def test_generate_while_another_thread_serves_others(make: Make, model: LlamaForCausalLM) -> None:
    spec = make()
    others = [spec.engine.submit(prompt(6, seed), max_new_tokens=25) for seed in range(10, 18)]
    ids = torch.tensor([prompt(5, seed) for seed in range(MAX_BATCH)])
    with serving(spec.engine):
        outputs = [spec.generate(ids, max_new_tokens=9) for _ in range(3)]
        for other in others:
            other.result(PATIENCE)
    expected = torch.tensor([prompt(5, seed) + greedy(model, prompt(5, seed), 9) for seed in range(MAX_BATCH)])
    assert all(torch.equal(output, expected) for output in outputs)
    assert [other.new_tokens for other in others] == [greedy(model, prompt(6, seed), 25) for seed in range(10, 18)]


def test_several_threads_generate_at_once(make: Make, model: LlamaForCausalLM) -> None:
    """None of them serves: each waiting caller steps for all."""
    spec = make()
    outputs: dict[int, list[list[int]]] = {}

    def generate(number: int) -> None:
        ids = torch.tensor([prompt(5, number), prompt(5, number + 10)])
        outputs[number] = [spec.generate(ids, max_new_tokens=12).tolist() for _ in range(4)]

    with threads(*[lambda number=number: generate(number) for number in range(4)]):
        pass
    for number, rows in outputs.items():
        texts = [prompt(5, seed) + greedy(model, prompt(5, seed), 12) for seed in (number, number + 10)]
        assert rows == [texts] * 4


def test_generate_beside_a_request_that_nobody_reads(make: Make, model: LlamaForCausalLM) -> None:
    spec = make()
    other = spec.engine.submit(prompt(6, 1), max_new_tokens=60)
    output = spec.generate(torch.tensor([prompt(5)]), max_new_tokens=5)
    assert output[0, 5:].tolist() == greedy(model, prompt(5), 5)
    assert other.result().token_ids == greedy(model, prompt(6, 1), 60)


def test_what_goes_wrong_with_one_row_of_generate_ends_them_all_and_nobody_else(
    make: Make, model: LlamaForCausalLM
) -> None:
    spec = make()
    other = spec.engine.submit(prompt(6, 1), max_new_tokens=60)

    def broken(ids: torch.Tensor, scores: None) -> torch.Tensor:
        if ids[0, 0] == prompt(5, 2)[0] and ids.shape[1] == 8:
            raise ZeroDivisionError("in row 1")
        return torch.tensor([False])

    ids = torch.tensor([prompt(5, seed) for seed in (1, 2, 3)])
    with pytest.raises(ZeroDivisionError, match="in row 1"):
        spec.generate(ids, max_new_tokens=20, stopping_criteria=broken)
    assert spec.engine.running == [other]
    assert other.result().token_ids == greedy(model, prompt(6, 1), 60)


# --- generate: continuations ---------------------------------------------------------------------


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_rows_of_several_continuations_follow_one_another(make: Make, model: LlamaForCausalLM, copies: int) -> None:
    """As transformers orders them: by ``repeat_interleave``. Its own greedy search refuses more than one."""
    spec = make()
    ids = torch.tensor([prompt(9, seed) for seed in range(MAX_BATCH // copies)])
    ids[0, :3] = PAD
    mask = (ids != PAD).long()
    got = spec.generate(ids, mask, max_new_tokens=11, num_return_sequences=copies, pad_token_id=PAD)
    repeated = [tensor.repeat_interleave(copies, dim=0) for tensor in (ids, mask)]
    expected = model.generate(
        repeated[0], attention_mask=repeated[1], max_new_tokens=11, do_sample=False, pad_token_id=PAD
    )
    assert torch.equal(got, expected)


def test_a_prompt_is_read_once_for_all_its_continuations(make: Make) -> None:
    spec = make()
    ids = torch.tensor([prompt(40, 1), prompt(40, 2)])
    spec.generate(ids, max_new_tokens=5, num_return_sequences=2)
    read = [(request.prefill_tokens, request.reused_tokens) for request in spec.stats.requests]
    # The last token of a prompt is computed by each row's own first step.
    assert read == [(40, 0), (0, 39)] * 2
    assert spec.stats.prefill_tokens == 80


def test_without_reuse_every_continuation_reads_its_prompt(make: Make, model: LlamaForCausalLM) -> None:
    spec = make(prefix_reuse=False)
    got = spec.generate(torch.tensor([prompt(40)]), max_new_tokens=5, num_return_sequences=3)
    assert [request.prefill_tokens for request in spec.stats.requests] == [40] * 3
    assert got[:, 40:].tolist() == [greedy(model, prompt(40), 5)] * 3


@pytest.mark.parametrize("copies", [0, -1, 1.0, True, "2"])
def test_what_is_no_number_of_continuations(make: Make, copies: Any) -> None:
    with raises(InvalidOption, where="generate", name="num_return_sequences"):
        make().generate(torch.tensor([[1, 2]]), num_return_sequences=copies)


# --- generate: stop strings, criteria and streamers ----------------------------------------------


def both(model: LlamaForCausalLM, spec: Speculator, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Our output, which is transformers' own."""
    mask = arguments.pop("attention_mask", torch.ones_like(ids))
    got = spec.generate(ids, mask, **arguments)
    expected = model.generate(ids, attention_mask=mask, do_sample=False, **arguments)
    assert torch.equal(got, expected), f"{got.tolist()} instead of {expected.tolist()}"
    return got


def absent(model: LlamaForCausalLM, ids: torch.Tensor, new: int) -> int:
    """A token that no row contains. As an EOS id it makes transformers pad rows that ended, which it else continues
    until the last one has ended."""
    texts = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return next(token for token in range(VOCAB) if not (texts == token).any())


@pytest.mark.parametrize("seed", range(12))
def test_stop_strings_end_a_row_where_transformers_does(
    make: Make, model: LlamaForCausalLM, letters: PreTrainedTokenizerFast, seed: int
) -> None:
    """Strings of one to five letters of the text, which may begin and end inside of tokens, or in the prompt."""
    spec = make()
    ids = torch.tensor([prompt(6, seed)])
    text = letters.decode([*prompt(6, seed), *greedy(model, prompt(6, seed), 30)])
    length, asked = 1 + seed % 5, len(letters.decode(prompt(6, seed)))
    begin = asked + random.Random(seed).randint(1 - length, 30)
    stop = text[begin : begin + length]
    got = both(model, spec, ids, max_new_tokens=30, stop_strings=stop, tokenizer=letters)
    assert stop in letters.decode(got[0])
    assert spec.stats.requests[0].finish_reason == "stop"


@pytest.mark.parametrize("seed", range(4))
def test_rows_end_at_stop_strings_of_their_own(
    make: Make, model: LlamaForCausalLM, letters: PreTrainedTokenizerFast, seed: int
) -> None:
    spec = make()
    ids = torch.tensor([prompt(6, 4 * seed + row) for row in range(MAX_BATCH)])
    ids[1, :2] = PAD
    mask = (ids != PAD).long()
    texts = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, pad_token_id=PAD)
    stops = [letters.decode(texts[row, 8 + 5 * row : 10 + 5 * row]) for row in range(3)]
    got = both(
        model,
        spec,
        ids,
        attention_mask=mask,
        max_new_tokens=30,
        stop_strings=stops,
        tokenizer=letters,
        eos_token_id=absent(model, ids, 30),
        pad_token_id=PAD,
    )
    assert {request.finish_reason for request in spec.stats.requests} >= {"stop"}
    assert got.shape[1] <= 36


def test_stop_strings_that_never_come(make: Make, model: LlamaForCausalLM, letters: PreTrainedTokenizerFast) -> None:
    spec = make()
    both(model, spec, torch.tensor([prompt(6)]), max_new_tokens=20, stop_strings=["abababab"], tokenizer=letters)
    assert spec.stats.requests[0].finish_reason == "max_new_tokens"


@pytest.mark.parametrize(
    ("stop", "given", "reason"),
    [
        ("ab", False, "stop strings need tokenizer="),
        ("", True, "must be a text or a list of texts"),
        (5, True, "must be a text or a list of texts"),
    ],
)
def test_what_is_no_stop_string(
    make: Make, letters: PreTrainedTokenizerFast, stop: Any, given: bool, reason: str
) -> None:
    with raises(InvalidInput, name="stop_strings", reason=re.compile(reason)):
        make().generate(torch.tensor([[1, 2]]), stop_strings=stop, tokenizer=letters if given else None)


class Meets:
    """A criterion that ends rows at any of some tokens, and keeps the ids that it was asked with."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = torch.tensor(tokens)
        self.asked: list[list[list[int]]] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.asked.append(ids.tolist())
        return torch.isin(ids[:, -1], self.tokens)


def test_a_criterion_is_asked_what_transformers_asks(make: Make, model: LlamaForCausalLM) -> None:
    text = greedy(model, prompt(6), 20)
    ours, theirs = Meets([text[9]]), Meets([text[9]])
    spec, ids = make(), torch.tensor([prompt(6)])
    got = spec.generate(ids, max_new_tokens=20, stopping_criteria=[ours])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, stopping_criteria=[theirs]
    )
    assert torch.equal(got, expected)
    assert ours.asked == theirs.asked and len(ours.asked) == text.index(text[9]) + 1
    assert spec.stats.requests[0].finish_reason == "stop"


@pytest.mark.parametrize("seed", range(3))
def test_criteria_of_a_batch(make: Make, model: LlamaForCausalLM, seed: int) -> None:
    ids = torch.tensor([prompt(6, 4 * seed + row) for row in range(MAX_BATCH)])
    texts = [greedy(model, row, 20) for row in ids.tolist()]
    criteria = StoppingCriteriaList(
        [Meets([text[3 + 4 * row] for row, text in enumerate(texts[:3])]), MaxLengthCriteria(max_length=23)]
    )
    eos = absent(model, ids, 20)
    got = both(model, make(), ids, max_new_tokens=20, stopping_criteria=criteria, eos_token_id=eos, pad_token_id=PAD)
    assert got.shape[1] <= 23


def test_criteria_and_stop_strings_and_eos_ids_together(
    make: Make, model: LlamaForCausalLM, letters: PreTrainedTokenizerFast
) -> None:
    ids = torch.tensor([prompt(6, row) for row in range(MAX_BATCH)])
    texts = [greedy(model, row, 30) for row in ids.tolist()]
    spec = make()
    both(
        model,
        spec,
        ids,
        max_new_tokens=30,
        eos_token_id=texts[0][12],
        stopping_criteria=[Meets([texts[1][8]])],
        stop_strings=[letters.decode(texts[2][15:17])],
        tokenizer=letters,
        pad_token_id=PAD,
    )
    assert {request.finish_reason for request in spec.stats.requests} >= {"eos", "stop"}


def test_a_streamer_hears_the_token_that_ends_the_text_and_the_end(make: Make, model: LlamaForCausalLM) -> None:
    """Also where the step emitted more after it."""
    text = greedy(model, prompt(6), 20)
    for at in range(1, 9):
        ours, theirs = Recorder(), Recorder()
        common: dict[str, Any] = {"max_new_tokens": 20, "stopping_criteria": [Meets([text[at]])]}
        ids = torch.tensor([prompt(6)])
        make().generate(ids, streamer=ours, **common)
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, streamer=theirs, **common)
        assert ours.received == theirs.received
        assert ours.received[-1] == "end"


def test_a_streamer_is_given_the_padding_of_a_prompt_too(make: Make, model: LlamaForCausalLM) -> None:
    ids = torch.tensor([[PAD, PAD, *prompt(4)]])
    common: dict[str, Any] = {"attention_mask": (ids != PAD).long(), "max_new_tokens": 4, "pad_token_id": PAD}
    ours, theirs = Recorder(), Recorder()
    make().generate(ids, streamer=ours, **common)
    model.generate(ids, do_sample=False, streamer=theirs, **common)
    assert ours.received == theirs.received


def test_a_streamer_follows_one_continuation(make: Make) -> None:
    streamer = Recorder()
    with raises(InvalidInput, name="streamer", reason=re.compile("it can only follow one row")):
        make().generate(torch.tensor([[1, 2]]), num_return_sequences=2, streamer=streamer)
    with raises(InvalidInput, name="streamer", reason=re.compile("no methods put and end")):
        make().generate(torch.tensor([[1, 2]]), streamer=NoStreamer())
    assert streamer.received == []


def test_an_argument_that_generate_does_not_know(make: Make) -> None:
    with raises(UnknownOption, where="generate", names="top_j", known=re.compile("num_return_sequences.*top_k")):
        make().generate(torch.tensor([[1, 2]]), top_j=0.5)
