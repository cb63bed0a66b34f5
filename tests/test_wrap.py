"""Bad input: each kind fails with an error of its own class that says what to do, before anything is built."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import tiny_llama
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

import speccompile
from speccompile import Speculator, errors
from speccompile.build import prefill_widths
from speccompile.errors import (
    Closed,
    EmptyPrompt,
    InvalidInput,
    InvalidOption,
    InvalidPolicy,
    InvalidTiers,
    ModelInTraining,
    ModelOnSeveralDevices,
    PromptTooLong,
    SpecCompileError,
    TokenOutOfVocabulary,
    TooManyRows,
    UnknownAcceptance,
    UnknownBackend,
    UnknownMode,
    UnknownOption,
    UnknownTier,
    UnsupportedDtype,
    UnsupportedModel,
)

# The module; the package's attribute of that name is the function.
WRAP = sys.modules["speccompile.wrap"]
VOCAB = 128
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}


def wrap(model: Any, mode: str | None = "ngram", **arguments: Any) -> Speculator:
    return speccompile.wrap(
        model, mode, **({"tiers": (0, 3), "max_batch": 2, "max_len": 64, "backend": "eager"} | arguments)
    )


def label(value: Any) -> str | None:
    """Names a case after its error and arguments."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, dict):
        return " ".join(f"{name}={list(x.shape) if isinstance(x, torch.Tensor) else x!r}" for name, x in value.items())
    return ""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Stands in for the build, so that a refusal that comes too late shows."""
    builds: list[bool] = []
    monkeypatch.setattr(WRAP, "build", lambda *_: builds.append(True))
    monkeypatch.setattr(WRAP, "Speculator", lambda *_: None)
    return builds


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=VOCAB)


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM) -> Iterator[Speculator]:
    with wrap(model) as spec:
        yield spec


@contextlib.contextmanager
def refused(kind: type[SpecCompileError], *says: str) -> Iterator[None]:
    """Expects an error of exactly that class whose message holds all of ``says``."""
    with pytest.raises(kind) as info:
        yield
    assert type(info.value) is kind
    for text in says:
        assert text in str(info.value)


# --- arguments of wrap -------------------------------------------------------------------------------------------


def test_good_arguments_are_built(built: list[bool], model: LlamaForCausalLM) -> None:
    wrap(model)
    assert built == [True]


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"mode": "medusa"}, UnknownMode, ["'medusa'", "ngram", "register_mode"]),
        ({"exit_layer": 1}, UnknownOption, ["exit_layer", "max_ngram, min_ngram"]),
        ({"max_tokens": 1, "batch": 2}, UnknownOption, ["batch, max_tokens", "max_ngram"]),
        ({"max_ngram": 0}, InvalidOption, ["max_ngram=0", "int >= 1"]),
        ({"mode": "early_exit", "exit_layer": 3}, InvalidOption, ["exit_layer=3", "1 .. 2"]),
        ({"policy": "fixed:2"}, UnknownTier, ["draft length 2", "built: 0, 3", "tiers="]),
        ({"policy": "schedule:1=3,2=7"}, UnknownTier, ["draft length 7", "built: 0, 3"]),
        ({"policy": "fast"}, InvalidPolicy, ["'fast'", "'fixed:7'", "choose(live_rows)"]),
        ({"policy": 3}, InvalidPolicy, ["policy=3", "no method choose"]),
        ({"backend": "tensorrt"}, UnknownBackend, ["'tensorrt'", "auto, eager, inductor"]),
        ({"acceptance": "typical"}, UnknownAcceptance, ["'typical'", "exact"]),
        ({"deterministic": "yes"}, InvalidOption, ["deterministic='yes'", "True, False or None"]),
        ({"tiers": (1, 3)}, InvalidTiers, ["0 is missing", "tiers=(0, 1, 3, 7)"]),
        ({"tiers": ()}, InvalidTiers, ["0 is missing"]),
        ({"tiers": (0, 3, 3)}, InvalidTiers, ["occurs twice"]),
        ({"tiers": (0, -1)}, InvalidTiers, ["-1 is no draft length"]),
        ({"tiers": (0, 1.0)}, InvalidTiers, ["1.0 is no draft length"]),
        ({"tiers": (0, True)}, InvalidTiers, ["True is no draft length"]),
        ({"tiers": "0,3"}, InvalidTiers, ["'0' is no draft length"]),
        ({"tiers": 3}, InvalidTiers, ["tiers=3", "no sequence"]),
        ({"max_batch": 0}, InvalidOption, ["max_batch=0", "at least 1"]),
        ({"max_batch": 1.5}, InvalidOption, ["max_batch=1.5", "int"]),
        ({"max_batch": True}, InvalidOption, ["max_batch=True"]),
        ({"max_len": 1}, InvalidOption, ["max_len=1", "at least 2"]),
        ({"max_len": "64"}, InvalidOption, ["max_len='64'"]),
    ],
    ids=label,
)
def test_bad_arguments(
    built: list[bool],
    model: LlamaForCausalLM,
    arguments: dict[str, Any],
    kind: type[SpecCompileError],
    says: list[str],
) -> None:
    with refused(kind, *says):
        wrap(model, **arguments)
    assert not built


def test_tiers_may_come_in_any_order_and_kind(built: list[bool], model: LlamaForCausalLM) -> None:
    for tiers in ([3, 0], range(4), {0, 3}, iter((0, 1))):
        wrap(model, tiers=tiers)
    assert len(built) == 4


# --- the model ---------------------------------------------------------------------------------------------------


def test_a_model_without_a_kv_cache() -> None:
    config = OpenAIGPTConfig(n_layer=2, n_embd=32, n_head=2, vocab_size=VOCAB)
    with refused(UnsupportedModel, "OpenAIGPTLMHeadModel", "it keeps no KV cache"):
        wrap(OpenAIGPTLMHeadModel(config).eval())


@pytest.mark.parametrize("kind", [LlamaModel, LlamaForSequenceClassification])
def test_a_llama_without_a_language_head(built: list[bool], kind: Any) -> None:
    with refused(UnsupportedModel, kind.__name__, "no lm_head", "AutoModelForCausalLM"):
        wrap(kind(LlamaConfig(**SIZES, vocab_size=VOCAB)).eval())
    assert not built


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), "HuggingFaceTB/SmolLM2-135M-Instruct", None])
def test_what_is_no_model(built: list[bool], thing: Any) -> None:
    with refused(UnsupportedModel, type(thing).__name__, "pass the model itself"):
        wrap(thing)
    assert not built


def test_a_rotary_table_that_depends_on_the_batch(built: list[bool]) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with refused(UnsupportedModel, "model.rotary_emb (dynamic)", "use max_len <= 64"):
        speccompile.wrap(tiny_llama(rope_parameters=rope, max_positions=64), max_len=65)
    assert not built


def test_a_model_in_training(built: list[bool]) -> None:
    with refused(ModelInTraining, "LlamaForCausalLM", "model.eval()"):
        wrap(tiny_llama().train())
    assert not built


def test_a_model_on_two_devices(built: list[bool]) -> None:
    model = tiny_llama()
    model.lm_head.to("meta")
    with refused(ModelOnSeveralDevices, "cpu, meta", "device_map={'': 'cpu'}", "model.to('cpu')"):
        wrap(model)
    assert not built


def test_a_dtype_that_is_not_supported(built: list[bool]) -> None:
    with refused(UnsupportedDtype, "torch.float64", "torch.float32", "model.to(torch.float32)"):
        wrap(tiny_llama(dtype=torch.float64))
    assert not built


def test_dtypes_that_the_model_itself_cannot_mix() -> None:
    model = tiny_llama()
    model.lm_head.to(torch.bfloat16)
    with refused(UnsupportedModel, "lm_head (Linear)", "dtype"):
        wrap(model)


# --- warnings ----------------------------------------------------------------------------------------------------


def test_max_len_beyond_the_positions_warns(built: list[bool]) -> None:
    model = tiny_llama(max_positions=64)
    with pytest.warns(UserWarning, match="max_len=65 exceeds the 64 positions") as caught:
        speccompile.wrap(model, max_len=65)
    assert caught[0].filename == __file__, "the warning points at the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        speccompile.wrap(model, max_len=64)
    assert len(built) == 2


def test_a_generation_config_that_samples_warns(built: list[bool]) -> None:
    model = tiny_llama()
    model.generation_config.do_sample = True
    with pytest.warns(UserWarning, match=r"decodes greedily \(do_sample=False\)"):
        wrap(model)
    assert built


# --- prompts -----------------------------------------------------------------------------------------------------


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"input_ids": torch.ones(1, 64, dtype=torch.int64)}, PromptTooLong, ["64 tokens", "at most 63", "larger"]),
        ({"input_ids": torch.ones(1, 0, dtype=torch.int64)}, EmptyPrompt, ["prompt 0", "at least one token"]),
        ({"input_ids": ids([5], [6]), "attention_mask": ids([1], [0])}, EmptyPrompt, ["prompt 1", "BOS"]),
        ({"input_ids": ids([1], [2], [3])}, TooManyRows, ["3 prompts", "max_batch=2", "split the batch"]),
        ({"input_ids": ids([1, 2], [3, VOCAB])}, TokenOutOfVocabulary, ["prompt 1", "id 128", "0 .. 127"]),
        ({"input_ids": ids([-1, 2])}, TokenOutOfVocabulary, ["prompt 0", "id -1"]),
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
def test_bad_prompts(
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
    with refused(kind, f"prompt {len(prompts) - 1}"):
        spec.check(prompts, max_new_tokens=2)


# --- arguments of generate, check and set_tier -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"temperature": 0.5, "num_beams": 2}, UnknownOption, ["generate", "num_beams, temperature", "max_new_tokens"]),
        ({"do_sample": True}, InvalidOption, ["do_sample=True", "use False"]),
        ({"max_new_tokens": 0}, InvalidOption, ["max_new_tokens=0", "at least 1"]),
        ({"max_new_tokens": -3}, InvalidOption, ["max_new_tokens=-3"]),
        ({"max_new_tokens": 2.0}, InvalidOption, ["max_new_tokens=2.0"]),
        ({"max_new_tokens": None}, InvalidOption, ["max_new_tokens=None"]),
        ({"eos_token_id": range(9)}, errors.TooManyEosTokens, ["9 EOS ids", "room for 8"]),
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
        ("repetition_penalty", 1.1),
        ("no_repeat_ngram_size", 2),
        ("bad_words_ids", [[3]]),
        ("suppress_tokens", [3]),
        ("begin_suppress_tokens", [3]),
        ("min_length", 5),
        ("min_new_tokens", 5),
        ("forced_eos_token_id", 3),
        ("sequence_bias", [[[3], 1.0]]),
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


@pytest.mark.parametrize("tier", [1, 7, -1, "3", None, True])
def test_set_tier_takes_what_was_built(spec: Speculator, tier: Any) -> None:
    before = spec.policy
    with refused(UnknownTier, f"draft length {tier!r}", "built: 0, 3", "tiers=... of wrap"):
        spec.set_tier(tier)
    assert spec.policy is before


def test_a_stage_that_is_not_there(spec: Speculator) -> None:
    with refused(errors.UnknownStage, "'medusa'", "tier K=3", "commit"):
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
        with refused(Closed, "wrap the model again"):
            use()
    # The model itself is as it was.
    assert torch.equal(model.generate(ids([1, 2, 3]), max_new_tokens=5, do_sample=False), before)


def test_a_speculator_closes_itself(model: LlamaForCausalLM) -> None:
    with wrap(model, "none", tiers=(0,)) as spec:
        assert spec.tiers[0].draft_len == 0
    with pytest.raises(Closed):
        spec.stats  # noqa: B018


# --- looking -----------------------------------------------------------------------------------------------------


def test_explain_mentions_the_facts(spec: Speculator) -> None:
    lines = dict(line.split("  ", 1) for line in spec.explain().splitlines())
    text = {name: rest.strip() for name, rest in lines.items()}
    assert {"LlamaForCausalLM", "2 layers", "vocabulary 128", "torch.float32", "cpu"} <= set(text["model"].split(", "))
    assert text["mode"].startswith("ngram: ")
    assert "ready" in text["drafts"]
    assert "(0, 3), 2 rows" in text["tiers"]
    assert f"prefill chunks of {prefill_widths(64)}" in text["tiers"]
    assert text["policy"] == str(spec.policy)
    assert text["acceptance"].startswith("exact")
    assert text["deterministic"].startswith("no")
    assert text["backend"].startswith("eager: asked for")
    assert text["bodies"] == "decoder_layer x2"
    assert text["passes"] == " -> ".join(spec.stages)
    assert f"{len(spec.arena)} tensors, 2 slots of 64 tokens" in text["state"]
    assert "largest logit difference" in text["capture check"]
    for part in spec.build_seconds:
        assert part in text["built in"]


def test_what_was_built(spec: Speculator) -> None:
    assert list(spec.tiers) == [0, 3]
    assert {key: tier.draft_len for key, tier in spec.tiers.items()} == {0: 0, 3: 3}
    assert all(tier.key.rows == 2 for tier in spec.tiers.values())
    assert tuple(spec.prefill) == prefill_widths(64)
    assert set(spec.stages) == set(spec.tiers[3].stages)
    assert next(iter(spec.stages)) == "capture"
    assert "no_drafts" in spec.tiers[0].stages
    assert "no_drafts" not in spec.stages


def test_the_default_policy_is_the_largest_tier(built: list[bool], model: LlamaForCausalLM, monkeypatch: Any) -> None:
    policies = []
    monkeypatch.setattr(WRAP, "Speculator", lambda *arguments: policies.append(arguments[-1]))
    wrap(model, tiers=(0, 2, 5))
    assert [str(policy) for policy in policies] == ["fixed:5"]
