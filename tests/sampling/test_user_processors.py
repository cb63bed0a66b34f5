"""A user's own logits processors: transformers' text with them in every mode and tier."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from speccompile import Speculator
from speccompile.errors import InvalidInput, RequestFailed
from speccompile.modes import registry
from speccompile.sampling.user import texts_in_front
from support.errors import raises
from support.plans import planned
from support.sampling_modes import Random
from support.users_processors import (
    MAKE,
    MODES,
    NEW,
    PROMPTS,
    VOCAB,
    AfterLast,
    NoSum,
    Once,
    TensorBias,
    model,
    new_tokens,
    of_transformers,
    spec_of,
    wrapped,
)


def assert_text_at_every_tier(spec: Speculator, processors: list[Any]) -> list[list[int]]:
    expected = [of_transformers(prompt, processors) for prompt in PROMPTS]
    for draft_len in spec.tiers:
        spec.set_tier(draft_len)
        spec.stats.reset()
        assert new_tokens(spec) == expected
        assert new_tokens(spec, PROMPTS[1:2]) == expected[1:2], "alone, in the executables of one row"
    return expected


# Which processor it is changes nothing that a drafter of its own would notice. "tensor" comes further down.
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("sequence bias", "ngram"),
        ("temperature", "ngram"),
        ("last token", "ngram"),
        ("several", "ngram"),
        ("several", "early_exit"),
    ],
)
def test_the_text_is_that_of_transformers_at_every_tier(name: str, mode: str) -> None:
    spec = spec_of(name, mode)
    expected = assert_text_at_every_tier(spec, MAKE[name]())
    if name != "temperature":
        assert expected != [of_transformers(prompt, []) for prompt in PROMPTS], "or it would prove nothing"
    assert 1 < spec.stats.acceptance_length < 4 or name == "several", "where nothing comes twice"


def test_with_options_of_a_request_the_same_text_for_all_modes_and_tiers() -> None:
    options = {"do_sample": True, "seed": 11, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}
    texts = []
    for mode in MODES:
        spec = spec_of("several", mode)
        for draft_len in spec.tiers:
            spec.set_tier(draft_len)
            texts.append(new_tokens(spec, **options))
    assert all(text == texts[0] for text in texts)
    assert texts[0] != new_tokens(spec, **(options | {"seed": 12}))
    assert texts[0] != new_tokens(spec)


def test_their_place_is_behind_the_penalties_and_in_front_of_the_warpers() -> None:
    """With one token kept, what is drawn is what transformers draws, whose processors come in this order.

    That it is the same in other modes is what the test above says.
    """
    options = {"do_sample": True, "top_k": 1, "temperature": 0.4, "repetition_penalty": 1.7}
    spec, processors = spec_of("last token", "ngram"), MAKE["last token"]()
    expected = [of_transformers(prompt, processors, **options) for prompt in PROMPTS]
    assert new_tokens(spec, **options) == expected
    penalty, temperature = hf.RepetitionPenaltyLogitsProcessor(1.7), hf.TemperatureLogitsWarper(0.4)
    for others in ([penalty, temperature, *processors], [*processors, penalty, temperature], [penalty, temperature]):
        assert expected != [of_transformers(prompt, others) for prompt in PROMPTS]
    assert expected == [of_transformers(prompt, [penalty, *processors, temperature]) for prompt in PROMPTS]


def test_a_padded_batch_has_transformers_text_for_each_row() -> None:
    spec, width = spec_of("several", "ngram"), max(len(prompt) for prompt in PROMPTS)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    expected = [of_transformers(prompt, MAKE["several"]()) for prompt in PROMPTS]
    assert spec.generate(ids, mask, max_new_tokens=NEW)[:, width:].tolist() == expected


def test_drafts_that_know_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place sees the drafts before it, right or wrong."""
    monkeypatch.setattr(registry, "_modes", dict(registry._modes) | {"random_drafts": Random})
    processors = [AfterLast(), Once(), hf.SuppressTokensLogitsProcessor(list(range(12, VOCAB)))]
    with wrapped(processors, "random_drafts", max_batch=1) as spec:
        spec.stats.reset()
        assert new_tokens(spec) == [of_transformers(prompt, processors) for prompt in PROMPTS]
        assert 1 < spec.stats.acceptance_length < 4


@pytest.mark.parametrize("options", [{"acceptance": "rejection", "deterministic": True}, {"acceptance": "block"}])
def test_with_other_rules_and_widths(options: dict[str, Any]) -> None:
    processors = MAKE["several"]()
    expected = [of_transformers(prompt, processors) for prompt in PROMPTS]
    with wrapped(processors, "early_exit", max_batch=1, **options) as spec:
        assert new_tokens(spec) == expected


def test_check_compares_with_what_transformers_does_with_them() -> None:
    spec = spec_of("several", "early_exit")
    assert spec.check(PROMPTS, max_new_tokens=NEW)
    assert spec.check(PROMPTS, max_new_tokens=NEW, reference="plain")


@pytest.mark.parametrize("nothing", [[], None])
def test_without_a_processor_steps_are_greedy(nothing: Any) -> None:
    config = planned(model(), "ngram", logits_processor=nothing, backend="eager").config
    assert config.kind == "greedy" and not config.logits_processors


def test_what_it_holds_may_be_changed_in_place() -> None:
    processor = TensorBias()
    with wrapped([processor], max_batch=1) as spec:
        before = assert_text_at_every_tier(spec, [processor])
        assert before != [of_transformers(prompt, []) for prompt in PROMPTS]
        processor.bias.neg_()
        assert assert_text_at_every_tier(spec, [processor]) != before
        assert 1 < spec.stats.acceptance_length < 4


def test_one_processor_without_a_list_and_a_prompt_that_is_too_short_for_it() -> None:
    with wrapped(NoSum(), tiers=(0, 1), max_batch=1) as spec:
        expected = [of_transformers(prompt, [NoSum()]) for prompt in PROMPTS[1:]]
        assert new_tokens(spec, PROMPTS[1:]) == expected
        for call in (lambda: new_tokens(spec), lambda: spec.engine.submit([4])):
            with raises(
                InvalidInput,
                name="the prompt",
                reason=re.compile("it has 1 tokens, and the logits processor NoSum fails for fewer"),
            ):
                call()
        assert spec.engine.idle


def test_a_drafter_that_is_the_target_drafts_what_the_target_chooses() -> None:
    processors = MAKE["several"]()
    with wrapped(processors, "early_exit", exit_layer=2, max_batch=1, prefix_reuse=False) as spec:
        for options in ({}, {"do_sample": True, "seed": 3}):
            spec.stats.reset()
            spec.engine.submit(PROMPTS[1], max_new_tokens=41, **options).result()
            assert spec.stats.acceptance_length == 4


def test_processors_that_forbid_everything() -> None:
    spec = wrapped(lambda ids, scores: scores.fill_(-math.inf), tiers=(0,), max_batch=1)
    with spec, raises(RequestFailed, reason=re.compile("the logits processors given to wrap, forbid every token")):
        spec.engine.submit([1, 2, 3]).result()


# --- looking -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_stages_print_as_python_that_runs(mode: str) -> None:
    spec = spec_of("several", mode)
    for tier in (*spec.engine.tiers.values(), *spec.engine.prefill_tiers.values()):
        stage = tier.stages.last
        assert not stage.graph.graph.find_nodes(op="get_attr")
        with torch.no_grad():
            stage.call(*stage.make_inputs())
    text = spec.stages["process_logits"].python
    assert f"processor_4_0,  # weight float32[{VOCAB}, {VOCAB}]" in text
    assert "processor_4_0," not in spec.stages["outline"].python


def test_they_are_listed() -> None:
    spec = spec_of("several", "ngram")
    names = "Once, TensorBias, RepetitionPenaltyLogitsProcessor, fold, AfterLast"
    assert f"logits processors  {names}: in every step" in spec.explain()
    assert f"begin_suppress_tokens, {names}, host_processors, temperature" in spec.stages["process_logits"].note
    assert {kind for _, _, kind in spec.engine.tiers} == {"sampled"}
    assert {kind for _, kind in spec.engine.prefill_tiers} == {"sampled", "inner"}
    assert set(spec.tiers) == {0, 1, 3}
    assert set(spec.prefill) == {width for width, kind in spec.engine.prefill_tiers if kind == "sampled"}
    graph, _ = spec.pipeline(3).run(spec.stages["outline"].graph)
    assert graph.op_counts() == spec.tiers[3].graph.op_counts()


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=3), st.integers(1, 4))
def test_every_place_has_its_text_at_the_end_of_a_row(texts: list[list[int]], width: int) -> None:
    context = torch.tensor([text + [-1] * (14 - len(text)) for text in texts])
    ends = torch.tensor([len(text) for text in texts])[:, None] - torch.arange(width).flip(0)
    rows = texts_in_front(context, ends).view(len(texts), width, -1)
    for text, row, lengths in zip(texts, rows.tolist(), ends.tolist(), strict=True):
        for place, end in zip(row, lengths, strict=True):
            wanted = text[: max(end, 0)]
            assert place == [text[0]] * (14 - len(wanted)) + wanted
