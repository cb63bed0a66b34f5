"""Rules in whole steps of a tiny model: texts, and the distribution that many seeds draw."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, acceptance, wrap
from speccompile.errors import InvalidOption
from support.errors import raises
from support.text_laws import distance_of_texts, text_law

PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
TINY = {"vocab": 16}


def greedy(model: LlamaForCausalLM, new: int) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


def make(model: LlamaForCausalLM, rule: Any, mode: str = "early_exit", **options: Any) -> Any:
    sizes = {"tiers": (0, 3), "max_batch": 2, "max_len": 63, "backend": "eager", "policy": "fixed:3"}
    return wrap(model, mode, acceptance=rule, **sizes | options)


@pytest.fixture(scope="module")
def spec_of(model: LlamaForCausalLM) -> Iterator[Callable[[str, str], Speculator]]:
    """By rule and mode, each wrapped once; those that hundreds of requests are drawn by run many at a time."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(
            lambda rule, mode: stack.enter_context(make(model, rule, mode, max_batch=2 if rule == "exact" else 16))
        )


#: With every mode that they take.
LOSSLESS = [
    (name, mode)
    for name, rule in acceptance.RULES.items()
    for mode in ("early_exit", "ngram")
    if rule.lossless and not (rule.needs_draft_probs and mode == "ngram")
]


@pytest.mark.parametrize(("rule", "mode"), LOSSLESS)
def test_greedy_requests_of_lossless_rules_have_the_greedy_text(
    model: LlamaForCausalLM, spec_of: Callable[[str, str], Speculator], rule: str, mode: str
) -> None:
    spec = spec_of(rule, mode)
    assert rule in spec.explain()
    expected = greedy(model, 40)
    assert spec.engine.submit(PROMPT, max_new_tokens=40).result().token_ids == expected
    # At temperature 0, beside one that draws, the same by the other executables.
    drawn = spec.engine.submit(PROMPT, max_new_tokens=40, do_sample=True, seed=3)
    assert spec.engine.submit(PROMPT, max_new_tokens=40).result().token_ids == expected
    again = spec.engine.submit(PROMPT, max_new_tokens=40, do_sample=True, seed=3)
    if rule == "exact":
        assert drawn.result().token_ids == again.result().token_ids


@pytest.mark.parametrize(("rule", "mode"), [pair for pair in LOSSLESS if pair[0] != "exact"])
def test_texts_of_many_seeds_are_distributed_as_the_targets(
    model: LlamaForCausalLM, spec_of: Callable[[str, str], Speculator], rule: str, mode: str
) -> None:
    """The first two of three new tokens, each one of the likeliest; the second comes out of a step with drafts."""
    count = 600
    # Every token has occurred, so that n-grams always propose.
    prompt = [*range(16), 1, 2, 3]
    options: dict[str, Any] = {"do_sample": True, "top_k": 8, "temperature": 2.0, "max_new_tokens": 3}
    spec = spec_of(rule, mode)
    spec.engine.run()
    spec.stats.reset()
    requests = [spec.engine.submit(prompt, seed=seed * 7919, **options) for seed in range(count)]
    spec.engine.run()
    assert 0 < spec.stats.accepted_tokens < spec.stats.draft_tokens
    texts = [tuple(request.new_tokens[:2]) for request in requests]
    assert abs(distance_of_texts(texts, text_law(model, prompt, 2, temperature=2.0, top_k=8))) < 3.9


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("rejection", "yes: emitted tokens have the distribution of the model's own tokens"),
        ("typical", "no: 'typical' changes the distribution of emitted tokens"),
    ],
)
def test_explain_states_whether_the_rule_is_lossless(model: LlamaForCausalLM, rule: str, line: str) -> None:
    with make(model, rule, max_batch=1) as spec:
        lines = dict(part.split(maxsplit=1) for part in spec.explain().splitlines())
    assert lines["lossless"] == line


def test_relaxed_in_the_thinking_phase_alone(model: LlamaForCausalLM) -> None:
    """A prompt with the begin token keeps drafts that greedy decoding refuses; without it, or after the end token, the
    text is greedy. A slot that is taken again knows nothing of the phase of its former owner."""
    rule = acceptance.Relaxed(begin=1, end=4, top_k=16, delta=1.0)
    with make(model, rule, exit_layer=1, prefix_reuse=False, max_batch=1) as spec:
        for prompt, thinks in (([1, 5, 6], True), ([5, 6, 7], False), ([1, 5, 4, 6], False), ([4, 1, 6], True)):
            ids = torch.tensor([prompt])
            plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
            spec.stats.reset()
            request = spec.engine.submit(prompt, max_new_tokens=5, eos_token_id=[])
            text = request.result().token_ids
            assert text[0] == plain[0, -1]
            if thinks and 4 not in text[:1]:
                assert spec.stats.acceptance_length == 4, "everything is near enough"
            elif 1 not in text:
                full = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
                assert text == full[0, len(prompt) :].tolist()
        with raises(InvalidOption, name="do_sample", reason=re.compile("'relaxed' is for greedy decoding")):
            spec.engine.submit([1], do_sample=True)


def test_typical_accepts_more_than_exact(model: LlamaForCausalLM) -> None:
    rates = []
    for rule in ("exact", acceptance.Typical(threshold=0.02, alpha=0.02)):
        with make(model, rule, exit_layer=1, max_batch=1) as spec:
            for options in ({}, {"do_sample": True, "seed": 1}):
                spec.stats.reset()
                spec.engine.submit(PROMPT, max_new_tokens=40, eos_token_id=[], **options).result()
                rates.append(spec.stats.acceptance_length)
    assert rates[2] > rates[0] and rates[3] > rates[1]
