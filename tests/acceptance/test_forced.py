"""``forced``: as many drafts as asked for, in the mean and in every run; text and KV agree."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import acceptance, wrap
from speccompile.acceptance import Exact, Forced, choose_rule
from speccompile.acceptance.forced import VARIABLE, forced_count
from speccompile.errors import InvalidOption
from support.errors import raises

SIZES: dict[str, Any] = {"tiers": (0, 1, 5), "max_batch": 2, "max_len": 63, "backend": "eager"}


def counts(rule: Forced, drafts: int, steps: int = 20_000) -> torch.Tensor:
    lengths, text = torch.arange(1, steps + 1), torch.arange(steps) % 7
    kept = forced_count(torch.zeros(1), torch.zeros(steps, drafts).long(), text.expand(steps, -1), lengths, rule=rule)
    assert torch.equal(kept.long().cumprod(1), kept.long()), "the first ones"
    return kept.sum(1)


@pytest.mark.parametrize("accepted", [0.0, 0.25, 1.0, 2.6, 5.0, 9.0])
def test_the_mean_is_what_was_asked_for(accepted: float) -> None:
    got = counts(Forced(accepted, seed=3), 5).double()
    wanted = min(accepted, 5.0)
    assert set(got.tolist()) <= {math.floor(wanted), math.ceil(wanted)}
    spread = math.sqrt((wanted % 1) * (1 - wanted % 1) / len(got))
    assert abs(float(got.mean()) - wanted) <= 3.3 * spread


def test_each_place_is_accepted_at_its_rate() -> None:
    rates = (0.9, 0.5, 0.5, 0.1)
    got = counts(Forced(rates=rates), 5)
    for place, rate in enumerate((*rates, 0.0), start=1):
        share = float((got >= place).double().mean())
        assert abs(share - rate) <= 3.3 * math.sqrt(rate * (1 - rate) / len(got))


def test_coins_follow_from_the_seed() -> None:
    assert torch.equal(counts(Forced(0.5, seed=1), 2), counts(Forced(0.5, seed=1), 2))
    assert not torch.equal(counts(Forced(0.5, seed=1), 2), counts(Forced(0.5, seed=2), 2))


@pytest.mark.parametrize("mode", ["ngram", "early_exit", "none"])
def test_steps_emit_so_many_and_the_kv_is_that_of_the_text(model: LlamaForCausalLM, mode: str) -> None:
    """The token after the drafts is the target's choice after exactly that text, which it reads from the KV."""
    with wrap(
        model, mode, acceptance=Forced(2.6, seed=7), prefix_reuse=False, **SIZES | {"max_batch": 1, "max_len": 511}
    ) as spec:
        assert "garbage" in spec.explain()
        texts, runs = [], []
        for _ in range(2):
            spec.stats.reset()
            request = spec.engine.submit([1, 2, 3], max_new_tokens=400, eos_token_id=[])
            ends = []
            while not request.finished:
                spec.engine.step()
                ends.append(len(request.new_tokens))
            texts.append(request.new_tokens)
            # The last step may have room for fewer.
            emitted = [after - before for before, after in itertools.pairwise(ends[:-1])]
            runs.append(emitted)
            assert set(emitted) == {3, 4}
            mean = sum(emitted) / len(emitted)
            assert abs(mean - 3.6) < 3.3 * math.sqrt(0.24 / len(emitted))
        assert texts[0] == texts[1] and runs[0] == runs[1]
        with torch.no_grad():
            choices = model(torch.tensor([[1, 2, 3, *texts[0]]])).logits[0].argmax(-1).tolist()
        for end in ends:
            assert texts[0][end - 1] == choices[2 + end - 1]


def test_the_tier_of_the_policy_runs_whatever_the_drafter_has(model: LlamaForCausalLM) -> None:
    with wrap(model, "none", acceptance=Forced(1), policy="fixed:1", **SIZES) as spec:
        spec.engine.submit([1, 2, 3], max_new_tokens=21, eos_token_id=[]).result()
        assert spec.stats.tier_steps == {1: 10} and spec.stats.acceptance_length == 2


def test_requests_that_draw(model: LlamaForCausalLM) -> None:
    with wrap(model, "ngram", acceptance=Forced(rates=(1.0, 1.0)), **SIZES) as spec:
        spec.engine.submit([1, 2, 3], max_new_tokens=31, eos_token_id=[], do_sample=True, seed=1).result()
        assert spec.stats.acceptance_length == 3


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choose_rule(None) == Exact()
    for text, rule in (("0", Exact()), ("", Exact()), ("2", Forced(2.0)), ("2.6", Forced(2.6))):
        monkeypatch.setenv(VARIABLE, text)
        assert choose_rule(None) == rule
        assert choose_rule("exact") == Exact(), "the requested rule wins"
    for text in ("two", "-1", "nan", "inf"):
        monkeypatch.setenv(VARIABLE, text)
        with raises(InvalidOption, where="the environment", name=VARIABLE, value=text):
            choose_rule(None)


@pytest.mark.parametrize(
    ("arguments", "name", "reason"),
    [
        ({}, "accepted", "give one of accepted, rates and trace"),
        ({"accepted": 1, "rates": (0.5,)}, "accepted", "give one of accepted, rates and trace"),
        ({"accepted": 1, "trace": [1]}, "accepted", "give one of accepted, rates and trace"),
        ({"accepted": -1}, "accepted", "number of at least 0"),
        ({"accepted": float("nan")}, "accepted", "number of at least 0"),
        ({"accepted": True}, "accepted", "number of at least 0"),
        ({"rates": ()}, "rates", "do not increase"),
        ({"rates": (0.5, 0.6)}, "rates", "do not increase"),
        ({"rates": (1.5,)}, "rates", "do not increase"),
        ({"rates": ["a"]}, "rates", "list of numbers"),
        ({"rates": 0.5}, "rates", "list of numbers"),
        ({"accepted": 1, "seed": -1}, "seed", r"int in 0 \.\. 9223372036854775807"),
        ({"accepted": 1, "seed": 2**63}, "seed", r"int in 0 \.\. 9223372036854775807"),
        ({"accepted": 1, "seed": True}, "seed", r"int in 0 \.\. 9223372036854775807"),
    ],
)
def test_options_of_forced_that_are_not_valid_are_refused(arguments: dict[str, Any], name: str, reason: str) -> None:
    with raises(InvalidOption, where="acceptance 'forced'", name=name, reason=re.compile(reason)):
        Forced(**arguments)
    with raises(InvalidOption, name="acceptance", reason=re.compile("it needs a number of drafts")):
        choose_rule("forced")


def test_it_is_among_the_rules() -> None:
    assert acceptance.RULES["forced"] is Forced and not Forced.lossless
    assert speccompile.wrap.__doc__ is not None and VARIABLE in speccompile.wrap.__doc__
