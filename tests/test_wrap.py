"""Bad input: each kind fails with an error of its own class that says what to do, before anything is built."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

import speccompile
from speccompile.errors import (
    InvalidOption,
    InvalidPolicy,
    InvalidTiers,
    ModelInTraining,
    ModelOnSeveralDevices,
    OptionOfAnotherMode,
    SpecCompileError,
    UnknownAcceptance,
    UnknownBackend,
    UnknownMode,
    UnknownOption,
    UnknownTier,
    UnsupportedDtype,
    UnsupportedModel,
)
from support.errors import raises
from support.plans import planned
from support.refused_wraps import VOCAB, label, refused, wrap
from support.tiny import tiny_llama

# The module; the package's attribute of that name is the function.
WRAP = sys.modules[speccompile.wrap.__module__]
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Stands in for the build, so that a refusal that comes too late shows."""
    builds: list[bool] = []
    monkeypatch.setattr(WRAP, "build", lambda *_: builds.append(True))
    monkeypatch.setattr(WRAP, "Speculator", lambda *_: None)
    return builds


TINY = {"vocab": VOCAB}


# --- arguments of wrap -------------------------------------------------------------------------------------------


def test_good_arguments_are_built(built: list[bool], model: LlamaForCausalLM) -> None:
    wrap(model)
    assert built == [True]


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"mode": "lookahead"}, UnknownMode, ["name='lookahead'", "ngram"]),
        ({"exit_layer": 1}, OptionOfAnotherMode, ["exit_layer", "max_ngram, min_ngram", "early_exit"]),
        ({"max_tokens": 1, "batch": 2}, UnknownOption, ["batch, max_tokens", "max_ngram"]),
        ({"max_ngram": 0}, InvalidOption, ["max_ngram=0", "int >= 1"]),
        ({"mode": "early_exit", "exit_layer": 3}, InvalidOption, ["exit_layer=3", "1 .. 2"]),
        ({"policy": "fixed:2"}, UnknownTier, ["tier=2", "built='0, 3'"]),
        ({"policy": "schedule:1=3,2=7"}, UnknownTier, ["tier=7", "built='0, 3'"]),
        ({"policy": "fast"}, InvalidPolicy, ["policy='fast'"]),
        ({"policy": 3}, InvalidPolicy, ["policy=3", "no method choose"]),
        ({"backend": "tensorrt"}, UnknownBackend, ["name='tensorrt'", "auto, eager, inductor, cudagraph"]),
        ({"acceptance": "likely"}, UnknownAcceptance, ["name='likely'", "exact"]),
        (
            {"acceptance": "block"},
            InvalidOption,
            ["acceptance='block'", "mode 'ngram' has none", "acceptance='rejection'"],
        ),
        ({"deterministic": "yes"}, InvalidOption, ["deterministic='yes'", "True, False or None"]),
        ({"tiers": (1, 3)}, InvalidTiers, ["tiers=(1, 3)", "0 is missing"]),
        ({"tiers": ()}, InvalidTiers, ["0 is missing"]),
        ({"tiers": (0, 3, 3)}, InvalidTiers, ["occurs twice"]),
        ({"tiers": (0, -1)}, InvalidTiers, ["-1 must be a draft length or a Tree"]),
        ({"tiers": (0, 1.0)}, InvalidTiers, ["1.0 must be a draft length or a Tree"]),
        ({"tiers": (0, True)}, InvalidTiers, ["True must be a draft length or a Tree"]),
        ({"tiers": "0,3"}, InvalidTiers, ["'0' must be a draft length or a Tree"]),
        ({"tiers": 3}, InvalidTiers, ["tiers=3", "not a sequence"]),
        ({"max_batch": 0}, InvalidOption, ["max_batch=0", "at least 1"]),
        ({"max_batch": 1.5}, InvalidOption, ["max_batch=1.5", "int"]),
        ({"max_batch": True}, InvalidOption, ["max_batch=True"]),
        ({"max_len": 1}, InvalidOption, ["max_len=1", "at least 2"]),
        ({"max_len": "64"}, InvalidOption, ["max_len='64'"]),
        ({"max_waiting": -1}, InvalidOption, ["max_waiting=-1", "at least 0"]),
        ({"max_waiting": None}, InvalidOption, ["max_waiting=None"]),
        ({"prefill_budget": 0}, InvalidOption, ["prefill_budget=0", "at least 1"]),
        ({"prefill_budget": "auto"}, InvalidOption, ["prefill_budget='auto'"]),
        ({"prefix_reuse": None}, InvalidOption, ["prefix_reuse=None", "True or False"]),
        ({"prefix_reuse": 1}, InvalidOption, ["prefix_reuse=1"]),
        ({"state_checkpoints": 0}, InvalidOption, ["state_checkpoints=0", "at least 1"]),
        ({"state_checkpoints": 8, "prefix_reuse": False}, InvalidOption, ["state_checkpoints=8", "prefix_reuse=False"]),
        ({"state_checkpoints": 40, "max_len": 40}, InvalidOption, ["state_checkpoints=40", "less than max_len (40)"]),
    ],
    ids=label,
)
def test_bad_arguments_are_refused_before_a_build(
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
    with refused(ModelInTraining, "model='LlamaForCausalLM'"):
        wrap(tiny_llama().train())
    assert not built


def test_a_model_on_two_devices(built: list[bool]) -> None:
    model = tiny_llama()
    model.lm_head.to("meta")
    with refused(ModelOnSeveralDevices, "cpu, meta", "first='cpu'"):
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


def test_the_default_policy_is_cost(built: list[bool], model: LlamaForCausalLM, monkeypatch: Any) -> None:
    policies = []
    monkeypatch.setattr(WRAP, "Speculator", lambda *arguments: policies.append(arguments[2]))
    wrap(model, tiers=(0, 2, 5))
    assert [str(policy) for policy in policies] == ["cost"]


# --- what is left out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("positions", "max_len"), [(96, 96), (4096, 2048)])
def test_max_len_is_by_default_what_the_model_has_positions_for(positions: int, max_len: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = planned(tiny_llama(vocab=VOCAB, max_positions=positions), "ngram", backend="eager")
    assert plan.config.max_len == max_len


def test_gpt2_is_wrapped_without_arguments_and_explain_names_its_positions() -> None:
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=VOCAB, n_positions=48, bos_token_id=0, eos_token_id=0
    )
    with speccompile.wrap(GPT2LMHeadModel(config).eval(), tiers=(0, 3), backend="eager") as spec:
        assert spec.arena.layout.max_len == 48
        assert "1 slot of 48 tokens (max_len is the 48 positions of the model)" in spec.explain()


def test_a_draft_without_a_mode_chooses_auto(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(WRAP, "_wrap", lambda _model, options, **_: modes.append(options.mode))
    speccompile.wrap(model, draft=model)
    speccompile.wrap(model, head="a-folder")
    speccompile.wrap(model)
    speccompile.wrap(model, None)
    speccompile.wrap(model, "draft_target", draft=model)
    assert modes == ["auto", "auto", "ngram", None, "draft_target"]


def test_a_draft_model_in_the_place_of_a_mode_is_refused_in_one_line(model: LlamaForCausalLM) -> None:
    reason = "it must be a name, got a model; to draft with a model use wrap(target, draft=model)"
    with raises(InvalidOption, where="wrap", name="mode", value=model, reason=reason) as info:
        speccompile.wrap(model, model)  # type: ignore[arg-type]
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("name", ["tiers", "policy", "backend", "acceptance", "max_batch", "weights"])
@pytest.mark.parametrize("value", [nn.Linear(2, 2), torch.zeros(1000)], ids=["module", "tensor"])
def test_no_message_shows_a_module_or_a_tensor(
    built: list[bool], model: LlamaForCausalLM, name: str, value: Any
) -> None:
    with pytest.raises(SpecCompileError) as info:
        wrap(model, **{name: value})
    assert "in_features" not in str(info.value) and "0., 0." not in str(info.value)
    assert len(str(info.value)) < 600
