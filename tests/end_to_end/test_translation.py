"""Encoder-decoders over text: texts equal to transformers' ``generate``, with sources of several lengths."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from transformers import GenerationConfig

import speccompile
from speccompile import Speculator
from speccompile.errors import InvalidInput, InvalidOption, UnusableInputs
from support.encoder_decoders import TRANSLATORS, VOCAB, varied

ROWS = 3


@cache
def wrapped(name: str, mode: str = "ngram") -> tuple[torch.nn.Module, Speculator]:
    model = varied(TRANSLATORS[name]())
    return model, speccompile.wrap(model, mode, backend="eager", max_batch=2, max_len=80, tiers=(0, 1, 3))


def sources() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(4, VOCAB, (ROWS, 14), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, 9:], mask[2, 4:] = 0, 0
    return ids.masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize("name", TRANSLATORS)
def test_texts_are_those_of_transformers(name: str) -> None:
    model, spec = wrapped(name)
    ids, mask = sources()
    expected = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    assert torch.equal(spec.generate(input_ids=ids, attention_mask=mask, max_new_tokens=30, do_sample=False), expected)
    # Without a mask pad tokens are tokens.
    expected = model.generate(ids, max_new_tokens=30, do_sample=False)
    assert torch.equal(spec.generate(ids, max_new_tokens=30, do_sample=False), expected)


@pytest.mark.parametrize("name", ["t5", "marian"])
def test_tiers_do_not_change_the_text(name: str) -> None:
    _, spec = wrapped(name)
    ids, mask = sources()
    expected = spec.generate(input_ids=ids, attention_mask=mask, max_new_tokens=30, num_draft_tokens=0)
    order = random.Random(0)
    requests = [
        spec.engine.submit([int(expected[row, 0])], inputs={"input_ids": ids[row][mask[row] == 1]}, max_new_tokens=30)
        for row in range(ROWS)
    ]
    while not all(request.finished for request in requests):
        spec.set_tier(order.choice([0, 1, 3]))
        spec.engine.step()
    spec.set_tier(None)
    for request, row in zip(requests, expected, strict=True):
        got = request.result().token_ids
        assert got == row[1 : 1 + len(got)].tolist()


def test_a_forced_first_token() -> None:
    model, spec = wrapped("m2m100")
    ids, mask = sources()
    options = {"input_ids": ids, "attention_mask": mask, "forced_bos_token_id": 50, "do_sample": False}
    for count in (1, 2, 12):
        expected = model.generate(**options, max_new_tokens=count)
        assert torch.equal(spec.generate(**options, max_new_tokens=count), expected)


def test_a_first_token_that_a_config_forces() -> None:
    """Also one that ends texts."""
    model = varied(TRANSLATORS["bart"]())
    model.generation_config.forced_bos_token_id = 50
    ids, mask = sources()
    options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
    with speccompile.wrap(model, "ngram", backend="eager", max_batch=2, max_len=80, tiers=(0, 3)) as spec:
        for others in ({}, {"forced_bos_token_id": [51]}, {"eos_token_id": 50}, {"max_new_tokens": 1}):
            assert torch.equal(spec.generate(**(options | others)), model.generate(**(options | others))), others
        copies = spec.generate(**options, eos_token_id=50, num_return_sequences=2)
        assert len(copies) == 2 * ROWS
        with pytest.raises(InvalidOption, match="return_dict_in_generate"):
            spec.generate(**options, return_dict_in_generate=True)
        with pytest.raises(InvalidOption, match="forced_bos_token_id"):
            spec.engine.submit([3], inputs={"input_ids": ids[0]})


def test_the_token_that_prompts_begin_with() -> None:
    model, spec = wrapped("marian")
    ids, mask = sources()
    options = {"input_ids": ids, "attention_mask": mask}
    for start in (11, [11, 12, 13], torch.tensor([11, 12, 13])):
        given = options | {"max_new_tokens": 9, "decoder_start_token_id": start}
        assert torch.equal(spec.generate(**given), model.generate(**given))
    config = GenerationConfig(max_new_tokens=7)
    expected = model.generate(**options, generation_config=config)
    assert torch.equal(spec.generate(**options, generation_config=config), expected)


def test_given_prompts_of_the_decoder() -> None:
    model, spec = wrapped("bart")
    ids, mask = sources()
    for prompts in (torch.tensor([[3, 9], [3, 10], [3, 11]]), torch.tensor([[9], [10], [11]])):
        options = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": prompts, "max_new_tokens": 12}
        assert torch.equal(spec.generate(**options), model.generate(**options))


@pytest.mark.parametrize("mode", ["none", "suffix"])
def test_other_drafters(mode: str) -> None:
    model, spec = wrapped("t5", mode)
    ids, mask = sources()
    options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 20}
    assert torch.equal(spec.generate(**options), model.generate(**options))


def test_drafts_that_are_right_are_accepted() -> None:
    """A drafter that knows the text, in Python and as a predicted text of the request."""
    model = varied(TRANSLATORS["marian"]())
    ids = torch.arange(20, 29)
    text = model.generate(ids[None], max_new_tokens=24)[0].tolist()
    sizes = {"backend": "eager", "max_batch": 2, "max_len": 80, "tiers": (0, 3), "policy": "fixed:3"}

    def known(tokens: list[int], draft_len: int) -> list[int]:
        return text[len(tokens) : len(tokens) + draft_len]

    for mode, options, own in (
        ("user_provided", {"draft": known, "host": True}, {}),
        ("prediction", {}, {"prediction": text}),
    ):
        with speccompile.wrap(model, mode, **sizes, **options) as spec:
            request = spec.engine.submit(text[:1], inputs={"input_ids": ids}, max_new_tokens=len(text) - 1, **own)
            assert text[:1] + request.result().token_ids == text
            assert request.stats.accepted_tokens > len(text) / 2


def test_reuse_compares_sources() -> None:
    _, spec = wrapped("marian")
    first, second = (torch.arange(start, start + 8) for start in (10, 40))
    prompt = [3, 5, 6, 7, 8, 9]

    def text(source: torch.Tensor) -> tuple[list[int], int]:
        request = spec.engine.submit(prompt, inputs={"input_ids": source}, max_new_tokens=12)
        return request.result().token_ids, request.stats.reused_tokens

    known, _ = text(first)
    other, reused = text(second)
    assert reused == 0 and other != known
    assert text(first) == (known, len(prompt) - 1)


def test_a_cancelled_request_leaves_no_source_behind() -> None:
    _, spec = wrapped("marian")
    alone = spec.engine.submit([3], inputs={"input_ids": torch.arange(20, 29)}, max_new_tokens=12).result().token_ids
    others = [
        spec.engine.submit([3], inputs={"input_ids": torch.arange(start, start + 12)}, max_new_tokens=40)
        for start in (50, 70)
    ]
    spec.engine.step()
    for request in others:
        request.cancel()
    again = spec.engine.submit([3], inputs={"input_ids": torch.arange(20, 29)}, max_new_tokens=12)
    assert again.result().token_ids == alone


def test_sampled_texts_do_not_depend_on_drafts() -> None:
    _, spec = wrapped("t5")
    ids, mask = sources()
    options = {"input_ids": ids, "attention_mask": mask, "do_sample": True, "seed": 4, "max_new_tokens": 20}
    assert torch.equal(spec.generate(**options), spec.generate(**options, num_draft_tokens=0))


def test_what_is_refused() -> None:
    model, spec = wrapped("marian")
    with pytest.raises(UnusableInputs, match="input_ids is missing"):
        spec.engine.submit([3])
    with pytest.raises(UnusableInputs, match="has no input 'input_features'"):
        spec.engine.submit([3], inputs={"input_features": torch.zeros(16, 60)})
    with pytest.raises(UnusableInputs, match=r"has 97 positions; 1 to 96|model's own code refuses"):
        spec.engine.submit([3], inputs={"input_ids": torch.arange(97) + 4})
    with pytest.raises(UnusableInputs, match="attention_mask is a list"):
        spec.generate(torch.arange(8)[None] + 4, attention_mask=[[1] * 8])
    with pytest.raises(UnusableInputs, match="inputs is a Tensor"):
        spec.engine.submit([3], inputs=torch.arange(8))
    for outputs in ((), "x", torch.zeros(1, 4, 7), torch.zeros(1, 4, 64).long()):
        with pytest.raises(UnusableInputs, match="encoder_outputs is"):
            spec.engine.submit([3], inputs={"encoder_outputs": outputs})
    source = {"input_ids": torch.arange(8)[None] + 4}
    for name, value in (
        ("decoder_input_ids", torch.zeros(1, 0).long()),
        ("decoder_attention_mask", [[1]]),
        ("forced_bos_token_id", "x"),
        ("decoder_start_token_id", [3, 4]),
    ):
        with pytest.raises(InvalidInput, match=name):
            spec.generate(**source, **{name: value})
    with pytest.raises(InvalidOption, match="forced_decoder_ids"):
        spec.generate(**source, forced_decoder_ids=[[1, 5]])
    with pytest.raises(UnusableInputs, match=r"compare spec\.generate"):
        spec.check([[3]])
    for options in ({"mode": "early_exit", "exit_layer": 1}, {"kv": "bfloat16"}, {"kv_memory": 4096}):
        with pytest.raises(InvalidOption, match="MarianMTModel is an encoder-decoder"):
            speccompile.wrap(model, backend="eager", **options)
