"""``return_dict_in_generate``: transformers' own output, place by place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessor
from transformers.generation import GenerateDecoderOnlyOutput

from speccompile import Speculator, wrap
from speccompile.errors import InvalidOption
from speccompile.modes import registry
from support.errors import raises
from support.sampling_modes import Random

VOCAB = 128
PAD = 7
EVERYTHING: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.fixture(scope="module")
def specs(model: LlamaForCausalLM) -> Iterator[dict[str, Speculator]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_modes", dict(registry._modes) | {"random_drafts": Random})
        sizes: dict[str, Any] = {"tiers": (0, 1, 3), "max_batch": 4, "max_len": 48, "backend": "eager"}
        yield {mode: wrap(model, mode, scores=True, **sizes) for mode in ("ngram", "random_drafts")}


@pytest.fixture
def spec(specs: dict[str, Speculator], model: LlamaForCausalLM) -> Iterator[Speculator]:
    before = model.generation_config.to_dict()
    specs["ngram"].set_tier(3)
    yield specs["ngram"]
    model.generation_config.update(**before)


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts of 8, 3, 1 and 6 tokens."""
    rows = [[1, 2, 3, 1, 2, 3, 1, 2], [9, 8, 10], [5], [40, 41, 42, 40, 41, 42]]
    ids = torch.tensor([[PAD] * (8 - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (8 - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["ngram", "random_drafts"])
@pytest.mark.parametrize("tier", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3}])
def test_a_ragged_batch_whose_rows_end_early(
    model: LlamaForCausalLM, specs: dict[str, Speculator], mode: str, tier: int, options: dict[str, Any]
) -> None:
    spec = specs[mode]
    spec.set_tier(tier)
    ids, mask = ragged()
    arguments: dict[str, Any] = {"max_new_tokens": 24, "pad_token_id": PAD, **options, **EVERYTHING}
    text = model.generate(ids, attention_mask=mask, do_sample=False, **arguments).sequences[:, 8:]
    arguments["eos_token_id"] = [int(text[0, 5]), int(text[2, 11])]
    expected = model.generate(ids, attention_mask=mask, do_sample=False, **arguments)
    got = spec.generate(ids, mask, **arguments)
    assert isinstance(got, GenerateDecoderOnlyOutput)
    assert torch.equal(got.sequences, expected.sequences)
    new = expected.sequences[:, 8:]
    is_eos = torch.isin(new, torch.tensor(arguments["eos_token_id"]))
    # Up to its EOS, that one included.
    live = is_eos.cumsum(1) - is_eos.long() == 0
    assert not live.all() and live[:, 0].all()
    for name in ("scores", "logits"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert isinstance(ours, tuple) and len(ours) == len(theirs) == new.shape[1]
        assert all(place.shape == (4, VOCAB) and place.dtype == torch.float32 for place in ours)
        ours, theirs = torch.stack(ours, 1), torch.stack(theirs, 1)
        close(ours[live], theirs[live])
        assert not ours[~live].any(), "no model ran for rows that have ended"
    transitions = model.compute_transition_scores(got.sequences, got.scores, normalize_logits=True)
    close(
        transitions[live],
        model.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True)[live],
    )


def test_transition_scores_of_drawn_rows(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids = torch.tensor([[1, 2, 3, 1, 2, 3]])
    out = spec.generate(
        ids, do_sample=True, seed=3, top_k=5, temperature=0.6, num_return_sequences=3, max_new_tokens=15, **EVERYTHING
    )
    assert len({tuple(row) for row in out.sequences.tolist()}) == 3
    transitions = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    for row, (text, got) in enumerate(zip(out.sequences, transitions, strict=True)):
        with torch.no_grad():
            logits = model(text[None]).logits[0, 5:-1]
        close(torch.stack(out.logits)[:, row], logits)
        kept = (logits / 0.6).topk(5)
        expected = [
            dict(zip(*pair, strict=True))
            for pair in zip(kept.indices.tolist(), kept.values.log_softmax(-1).tolist(), strict=True)
        ]
        close(got, torch.tensor([of[token] for of, token in zip(expected, text[6:].tolist(), strict=True)]))


class Offset(LogitsProcessor):
    """Of the user's own."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + (torch.arange(VOCAB) == (input_ids[:, -1:] + 1) % VOCAB) * 2.5


def test_scores_are_behind_the_users_own_processors(model: LlamaForCausalLM) -> None:
    ids, mask = ragged()
    arguments: dict[str, Any] = {"max_new_tokens": 12, "repetition_penalty": 1.2, **EVERYTHING}
    expected = model.generate(ids, attention_mask=mask, do_sample=False, logits_processor=[Offset()], **arguments)
    sizes: dict[str, Any] = {"tiers": (0, 3), "max_batch": 4, "max_len": 31, "backend": "eager"}
    with wrap(model, "early_exit", exit_layer=1, scores=True, logits_processor=Offset(), **sizes) as spec:
        got = spec.generate(ids, mask, **arguments)
        assert torch.equal(got.sequences, expected.sequences)
        close(got.scores, expected.scores)
        close(got.logits, expected.logits)


def test_a_dict_alone_has_the_sequences_alone(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids = torch.tensor([[1, 2, 3, 4]])
    plain = spec.generate(ids, max_new_tokens=8)
    out = spec.generate(ids, max_new_tokens=8, return_dict_in_generate=True)
    assert list(out) == ["sequences"] and torch.equal(out.sequences, plain)
    assert spec.engine.tier.key.sampling == "greedy", "it needs no other executable"
    out = spec.generate(ids, max_new_tokens=8, return_dict_in_generate=True, output_logits=True)
    assert list(out) == ["sequences", "logits"] and len(out.logits) == 8


def test_the_generation_config_is_heeded(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids = torch.tensor([[1, 2, 3, 4]])
    plain = spec.generate(ids, max_new_tokens=8)
    # As in transformers, outputs mean nothing where no dict is returned.
    model.generation_config.output_scores = model.generation_config.output_attentions = True
    assert torch.equal(spec.generate(ids, max_new_tokens=8), plain)
    model.generation_config.return_dict_in_generate = True
    with raises(
        InvalidOption,
        where="the model's generation_config",
        name="output_attentions",
        value=True,
        reason=re.compile("a step keeps none"),
    ):
        spec.generate(ids, max_new_tokens=8)
    out = spec.generate(ids, max_new_tokens=8, output_attentions=False)
    assert isinstance(out, GenerateDecoderOnlyOutput) and out.logits is None and len(out.scores) == 8
    out = spec.generate(ids, max_new_tokens=8, output_attentions=False, output_scores=False, output_logits=True)
    assert isinstance(out, GenerateDecoderOnlyOutput) and out.scores is None and len(out.logits) == 8
    assert torch.equal(spec.generate(ids, max_new_tokens=8, return_dict_in_generate=False), plain)


@pytest.mark.parametrize("name", ["output_scores", "output_logits"])
def test_outputs_need_a_dict(spec: Speculator, name: str) -> None:
    with raises(InvalidOption, name=name, value=True, reason="it needs return_dict_in_generate=True"):
        spec.generate(torch.tensor([[1]]), **{name: True})


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_what_never_leaves_a_step_is_refused(spec: Speculator, name: str) -> None:
    for more in ({}, {"return_dict_in_generate": True}):
        with raises(InvalidOption, name=name, value=True):
            spec.generate(torch.tensor([[1]]), **{name: True}, **more)
    assert spec.generate(torch.tensor([[1]]), max_new_tokens=2, **{name: False}).shape == (1, 3)


@pytest.mark.parametrize("name", [*EVERYTHING, "output_attentions", "output_hidden_states"])
def test_bad_values_of_outputs(spec: Speculator, name: str) -> None:
    with raises(InvalidOption, where="generate", name=name, value=1, reason="use True, False or None"):
        spec.generate(torch.tensor([[1]]), **{name: 1})
