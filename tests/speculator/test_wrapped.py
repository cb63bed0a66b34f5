"""What a wrapped model refuses, each with an error of its own class, and what it reports of itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator, errors
from speccompile.compiler.layout import prefill_widths
from speccompile.errors import (
    Closed,
    EmptyPrompt,
    InvalidInput,
    InvalidOption,
    PromptTooLong,
    SpecCompileError,
    TokenOutOfVocabulary,
    UnknownOption,
    UnknownTier,
)
from speccompile.graph.keys import TierKey
from speccompile.policies import Fixed
from support.refused_wraps import VOCAB, label, refused, wrap

TINY = {"vocab": VOCAB}


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM) -> Iterator[Speculator]:
    with wrap(model) as spec:
        yield spec


# --- prompts -----------------------------------------------------------------------------------------------------


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"input_ids": torch.ones(1, 64, dtype=torch.int64)}, PromptTooLong, ["row=0", "length=64", "allowed=63"]),
        ({"input_ids": torch.ones(1, 0, dtype=torch.int64)}, EmptyPrompt, ["row=0"]),
        ({"input_ids": ids([5], [6]), "attention_mask": ids([1], [0])}, EmptyPrompt, ["row=1"]),
        ({"input_ids": ids([1, 2], [3, VOCAB])}, TokenOutOfVocabulary, ["row=1", "token=128", "last=127"]),
        ({"input_ids": ids([-1, 2])}, TokenOutOfVocabulary, ["row=0", "token=-1"]),
        ({"input_ids": torch.ones(3, dtype=torch.int64)}, InvalidInput, ["input_ids", "[rows, tokens]"]),
        ({"input_ids": [[1, 2]]}, InvalidInput, ["input_ids", "tensor"]),
        ({"input_ids": torch.ones(1, 3)}, InvalidInput, ["input_ids", "torch.float32", "integer"]),
        ({"input_ids": torch.ones(0, 3, dtype=torch.int64)}, InvalidInput, ["no rows"]),
        (
            {"input_ids": ids([1, 2]), "attention_mask": ids([1])},
            InvalidInput,
            ["attention_mask", "[1, 1]", "[1, 2]"],
        ),
    ],
    ids=label,
)
def test_bad_prompts_are_refused_and_leave_no_request(
    spec: Speculator, arguments: dict[str, Any], kind: type[SpecCompileError], says: list[str]
) -> None:
    with refused(kind, *says):
        spec.generate(**arguments)
    assert not spec.engine.running


def test_a_token_id_at_padding_does_not_count(spec: Speculator) -> None:
    given = ids([-100, 5, 6])
    output = spec.generate(given, ids([0, 1, 1]), max_new_tokens=2)
    assert torch.equal(output[:, :3], given)


def test_the_longest_prompt_is_taken(spec: Speculator) -> None:
    assert spec.generate(torch.ones(1, 63, dtype=torch.int64), max_new_tokens=1).shape == (1, 64)


@pytest.mark.parametrize(
    ("prompts", "kind"),
    [([[]], EmptyPrompt), ([[1], [1] * 64], PromptTooLong), ([[1], [VOCAB]], TokenOutOfVocabulary)],
)
def test_check_refuses_the_same_prompts(
    spec: Speculator, prompts: list[list[int]], kind: type[SpecCompileError]
) -> None:
    with refused(kind, f"row={len(prompts) - 1}"):
        spec.check(prompts, max_new_tokens=2)


# --- arguments of generate, check and set_tier -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"top_j": 0.5, "beams": 2}, UnknownOption, ["generate", "beams, top_j", "max_new_tokens", "top_k"]),
        ({"do_sample": 1}, InvalidOption, ["do_sample=1", "True, False or None"]),
        ({"max_new_tokens": 0}, InvalidOption, ["max_new_tokens=0", "at least 1"]),
        ({"max_new_tokens": -3}, InvalidOption, ["max_new_tokens=-3"]),
        ({"max_new_tokens": 2.0}, InvalidOption, ["max_new_tokens=2.0"]),
        ({"eos_token_id": range(9)}, errors.TooManyEosTokens, ["count=9", "capacity=8"]),
    ],
    ids=label,
)
def test_bad_arguments_of_generate(
    spec: Speculator, arguments: dict[str, Any], kind: type[SpecCompileError], says: list[str]
) -> None:
    with refused(kind, *says):
        spec.generate(ids([1, 2, 3]), **arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("encoder_repetition_penalty", 1.5),
        ("exponential_decay_length_penalty", (3, 1.1)),
        ("num_beams", 2),
    ],
)
def test_a_generation_config_that_changes_the_text(
    spec: Speculator, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(model.generation_config, name, value)
    with refused(InvalidOption, "the model's generation_config", f"{name}={value!r}", f"generation_config.{name} ="):
        spec.generate(ids([1, 2, 3]), max_new_tokens=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.7),
        ("no_repeat_ngram_size", 2),
        ("bad_words_ids", [[3], [5, 6]]),
        ("sequence_bias", [[[3], 9.0]]),
        ("suppress_tokens", list(range(60))),
        ("begin_suppress_tokens", list(range(64))),
        ("min_new_tokens", 5),
        ("forced_eos_token_id", 3),
    ],
)
def test_a_generation_config_is_heeded_as_transformers_heeds_it(
    spec: Speculator, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(model.generation_config, name, value)
    prompt = ids([1, 2, 3, 1, 2, 3, 1, 2])
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False)
    for draft_len in (0, 3):
        spec.set_tier(draft_len)
        assert torch.equal(spec.generate(prompt, max_new_tokens=30), expected)
    assert spec.check([[1, 2, 3, 1, 2, 3]], max_new_tokens=20)


@pytest.mark.parametrize(
    ("name", "value"), [("repetition_penalty", 1.0), ("no_repeat_ngram_size", 0), ("temperature", 0.3), ("top_p", 0.5)]
)
def test_a_generation_config_that_changes_nothing(
    spec: Speculator, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    expected = spec.generate(ids([1, 2, 3]), max_new_tokens=8)
    monkeypatch.setattr(model.generation_config, name, value)
    assert torch.equal(spec.generate(ids([1, 2, 3]), max_new_tokens=8), expected)


def test_check_knows_two_references(spec: Speculator) -> None:
    with refused(InvalidOption, "reference='hf'", "'transformers' or 'plain'"):
        spec.check([[1]], reference="hf")  # type: ignore[arg-type]
    with refused(InvalidOption, "max_new_tokens=0"):
        spec.check([[1]], max_new_tokens=0)


@pytest.mark.parametrize("tier", [1, 7, -1, "3", True])
def test_set_tier_takes_what_was_built(spec: Speculator, tier: Any) -> None:
    before = spec.policy
    with refused(UnknownTier, f"tier={tier!r}", "built='0, 3'"):
        spec.set_tier(tier)
    assert spec.policy is before


def test_set_tier_none_returns_to_the_policy_of_wrap(model: LlamaForCausalLM) -> None:
    with speccompile.wrap(model, policy="gate", tiers=(0, 3), max_len=32, backend="eager") as own:
        before = own.policy
        own.set_tier(3)
        assert own.policy == Fixed(3) != before
        own.set_tier(None)
        assert own.policy is before
        own.generate(ids([1, 2, 3]), max_new_tokens=4)


def test_a_stage_that_is_not_there(spec: Speculator) -> None:
    with refused(errors.UnknownStage, "name='medusa'", "tier K=3, 2 rows", "commit"):
        spec.stages["medusa"]


# --- closing -----------------------------------------------------------------------------------------------------


def test_a_closed_speculator(model: LlamaForCausalLM) -> None:
    spec = wrap(model, "none", tiers=(0,))
    before = spec.generate(ids([1, 2, 3]), max_new_tokens=5)
    spec.close()
    spec.close()
    for use in (
        lambda: spec.generate(ids([1])),
        lambda: spec.check([[1]]),
        lambda: spec.set_tier(0),
        lambda: spec.explain(),
        lambda: spec.tiers,
        lambda: spec.prefill,
        lambda: spec.stages,
        lambda: spec.stats,
        lambda: spec.arena,
        lambda: spec.policy,
        lambda: spec.engine,
        lambda: spec.build_seconds,
        lambda: spec.pipeline(),
    ):
        with refused(Closed):
            use()
    # The model itself is as it was.
    assert torch.equal(model.generate(ids([1, 2, 3]), max_new_tokens=5, do_sample=False), before)


def test_a_speculator_closes_itself(model: LlamaForCausalLM) -> None:
    with wrap(model, "none", tiers=(0,)) as spec:
        assert spec.tiers[0].draft_len == 0
    with pytest.raises(Closed):
        spec.stats  # noqa: B018


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_a_wrap_that_nobody_has_any_more_holds_no_tensors(model: LlamaForCausalLM, closed: bool) -> None:
    """At once, without Python's collector of cycles: it does not know how much memory a tensor takes, and a notebook's
    cell that wraps again would hold every earlier arena and packed weight."""
    gc.collect()
    gc.disable()
    try:
        spec = wrap(model, "ngram", tiers=(0, 3))
        spec.generate(ids([1, 2, 3, 1, 2, 3]), max_new_tokens=5)
        held = [weakref.ref(spec.engine), weakref.ref(spec.arena), weakref.ref(spec.arena["tokens"])]
        if closed:
            spec.close()
        del spec
        assert [ref() for ref in held] == [None, None, None]
    finally:
        gc.enable()


# --- looking -----------------------------------------------------------------------------------------------------


def test_explain_mentions_the_facts(spec: Speculator) -> None:
    lines = dict(line.split("  ", 1) for line in spec.explain().splitlines())
    text = {name: rest.strip() for name, rest in lines.items()}
    assert {"LlamaForCausalLM", "2 layers", "vocabulary 128", "torch.float32", "cpu"} <= set(text["model"].split(", "))
    assert text["mode"].startswith("ngram: ")
    assert "ready" in text["drafts"]
    assert "(0, 3), each for 1, 2 rows" in text["tiers"]
    assert f"prefill chunks of {prefill_widths(64)}" in text["tiers"]
    assert "2 slots, at most 1024 waiting" in text["engine"]
    assert "as many as keep a step within 2 usual ones" in text["engine"]
    assert "prefix reuse on" in text["engine"]
    assert "results are read when a step ends" in text["engine"]
    # Behind it the costs of steps, if a test has measured them.
    assert text["policy"].startswith(str(spec.policy))
    assert text["acceptance"].startswith("exact")
    assert text["lossless"].startswith("yes: ")
    assert text["deterministic"].startswith("no")
    assert text["backend"].startswith("eager: requested")
    assert text["bodies"] == "decoder_layer x2"
    assert text["passes"] == " -> ".join(spec.stages)
    assert f"{len(spec.arena)} tensors, 2 slots of 64 tokens" in text["state"]
    assert "largest logit difference" in text["capture check"]
    for part in spec.build_seconds:
        assert part in text["built in"]


def test_the_built_tiers_are_listed(spec: Speculator) -> None:
    assert list(spec.tiers) == [0, 3]
    assert {key: tier.draft_len for key, tier in spec.tiers.items()} == {0: 0, 3: 3}
    assert all(tier.key.rows == 2 for tier in spec.tiers.values())
    built = {
        (0, 1): "tier K=0, 1 row",
        (0, 2): "tier K=0, 2 rows",
        (3, 1): "tier K=3, 1 row",
        (3, 2): "tier K=3, 2 rows",
    }
    names = {name: tier.name for name, tier in spec.engine.tiers.items() if name[2] == "greedy"}
    assert names == {(*key, "greedy"): name for key, name in built.items()}
    for (draft_len, rows, kind), tier in spec.engine.tiers.items():
        assert (tier.draft_len, tier.key) == (draft_len, TierKey(rows, draft_len + 1, kind))
    assert spec.tiers == {draft_len: spec.engine.tiers[draft_len, 2, "greedy"] for draft_len in (0, 3)}
    assert (spec.engine.draft_lens, spec.engine.table.row_counts) == ((0, 3), (1, 2))
    assert tuple(spec.prefill) == prefill_widths(64)
    assert set(spec.stages) == set(spec.tiers[3].stages)
    assert next(iter(spec.stages)) == "capture"
    assert "no_drafts" in spec.tiers[0].stages
    assert "no_drafts" not in spec.stages
