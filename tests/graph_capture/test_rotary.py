"""Rotary tables that change with the length of a text: exact within one regime, refused beyond, never disturbed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

import speccompile
from speccompile.errors import UnsupportedModel
from speccompile.graph_capture.rotary import changing_tables, check_rotary, fixed_rotary
from speccompile.utils.transformers_version import FROM_5_21
from support.errors import raises
from support.families import family
from support.tiny import tiny_llama

LIMIT, LONG = 48, 64
DYNAMIC = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0}
LONGROPE = {
    "rope_theta": 10000.0,
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [6.0] * 8,
    "original_max_position_embeddings": LIMIT,
}
DEFAULT = {"rope_theta": 10000.0, "rope_type": "default"}


def dynamic_llama() -> PreTrainedModel:
    return tiny_llama(max_positions=LIMIT, rope_parameters=dict(DYNAMIC))


def longrope_llama() -> PreTrainedModel:
    return tiny_llama(max_positions=256, rope_parameters=dict(LONGROPE))


def longrope_phi3() -> PreTrainedModel:
    sizes = {"max_position_embeddings": 256, "original_max_position_embeddings": LIMIT}
    return family("phi3", rope_parameters=dict(LONGROPE), **sizes)


def dynamic_gemma3() -> PreTrainedModel:
    """A table for each kind of layer, one of which changes."""
    tables = {"full_attention": dict(DYNAMIC), "sliding_attention": dict(DEFAULT)}
    return family("gemma3_text", rope_parameters=tables, max_position_embeddings=LIMIT)


CHANGING = [dynamic_llama, longrope_llama, longrope_phi3, dynamic_gemma3]
by_kind = pytest.mark.parametrize("make", CHANGING, ids=lambda make: make.__name__)


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 120, (1, length), generator=torch.Generator().manual_seed(seed))


def text(model: PreTrainedModel, length: int, total: int) -> torch.Tensor:
    """transformers' own text of ``total`` tokens."""
    ids = prompt(length)
    out: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=total - length, do_sample=False
    )
    return out


def logits(model: PreTrainedModel, length: int) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt(length)).logits  # type: ignore[no-any-return]


def wrap(model: PreTrainedModel, max_len: int = LIMIT) -> speccompile.Speculator:
    return speccompile.wrap(model, tiers=(0, 3), max_len=max_len, backend="eager", policy="fixed:3")


# --- the border ----------------------------------------------------------------------------------


@by_kind
def test_beyond_the_border_is_refused_with_the_number_to_use(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    check_rotary(model, LIMIT)
    table = r"^the rotary table of model\.rotary_emb \((dynamic|longrope)\) .* than 48 .*use max_len <= 48 \(now 49\)$"
    with raises(UnsupportedModel, model=type(model).__name__, reason=re.compile(table)):
        wrap(model, LIMIT + 1)


@pytest.mark.skipif(not FROM_5_21, reason="a model with longrope for each kind of layer needs transformers 5.21")
def test_each_kind_of_layer_has_a_border_of_its_own() -> None:
    tables = {
        "full_attention": dict(LONGROPE),
        "sliding_attention": LONGROPE | {"original_max_position_embeddings": 40},
    }
    model = family("gemma3_text", rope_parameters=tables, max_position_embeddings=256)
    check_rotary(model, 40)
    for max_len, limit in ((41, 40), (LIMIT + 1, 40)):
        reason = re.compile(rf"\(longrope\) .*use max_len <= {limit} \(now {max_len}\)")
        with raises(UnsupportedModel, reason=reason):
            check_rotary(model, max_len)


@by_kind
def test_the_border_is_where_the_models_own_text_changes(make: Callable[[], PreTrainedModel]) -> None:
    """Up to it a token's logits do not depend on how long the text gets; one token further they do."""
    model = make()
    short, last = logits(model, LIMIT - 1), logits(model, LIMIT)
    torch.testing.assert_close(last[:, :-1], short)
    assert not torch.allclose(logits(model, LIMIT + 1)[:, : LIMIT - 1], short, atol=1e-4)


@functools.cache
def twin_texts(make: Callable[[], PreTrainedModel]) -> dict[str, torch.Tensor]:
    """What an untouched model says, short and long."""
    twin = make()
    return {"short": text(twin, 9, LIMIT), "long": text(twin, 20, LONG), "middle": text(twin, LIMIT, LIMIT + 9)}


@pytest.mark.parametrize("make", [dynamic_llama, longrope_phi3, dynamic_gemma3], ids=lambda make: make.__name__)
def test_within_the_border_text_is_exact_and_the_model_is_not_disturbed(make: Callable[[], PreTrainedModel]) -> None:
    model, wanted = make(), twin_texts(make)
    logits(model, 5)  # whatever the table was before, it is now that of short texts
    before = {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
    kinds = model.model.rotary_emb.rope_type
    spec = wrap(model)
    assert model.model.rotary_emb.rope_type == kinds
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert torch.equal(spec.generate(prompt(9), max_new_tokens=LIMIT - 9), wanted["short"])
    # transformers' own text, within the border and beyond it, is what it would be without us;
    assert torch.equal(text(model, 9, LIMIT), wanted["short"])
    assert torch.equal(text(model, 20, LONG), wanted["long"])
    changed = [name for name in changing_tables(model) if not torch.equal(model.get_buffer(name), before[name])]
    assert changed, "the long text left the table as it was: this test proves nothing"
    # and leaves ours alone: the captured graph has its own table.
    assert torch.equal(spec.generate(prompt(9), max_new_tokens=LIMIT - 9), wanted["short"])
    spec.close()
    assert torch.equal(text(model, LIMIT, LIMIT + 9), wanted["middle"])
    assert torch.equal(text(model, 9, LIMIT), wanted["short"])


@pytest.mark.parametrize("make", [dynamic_llama, longrope_llama], ids=lambda make: make.__name__)
def test_a_model_that_just_wrote_a_long_text_can_be_wrapped(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    text(model, 20, LONG)
    for _ in range(2):  # captured anew, then from the store
        with wrap(model) as spec:
            assert torch.equal(spec.generate(prompt(9), max_new_tokens=LIMIT - 9), twin_texts(make)["short"])
        text(model, 20, LONG)


# --- the pieces ----------------------------------------------------------------------------------


def test_tables_that_may_change_are_named() -> None:
    # A table and the one of short texts, which are a single tensor at times.
    names = {f"model.rotary_emb.{name}" for name in ("inv_freq", "original_inv_freq")}
    assert changing_tables(dynamic_llama()) == changing_tables(longrope_phi3()) == names
    names = {f"model.rotary_emb.full_attention_{name}" for name in ("inv_freq", "original_inv_freq")}
    assert changing_tables(dynamic_gemma3()) == names
    for model in (tiny_llama(), family("gemma3_text"), family("gpt2")):
        assert changing_tables(model) == set()
        check_rotary(model, 10**9)


@by_kind
def test_inside_the_table_is_read_as_it_is(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    rotary = model.model.rotary_emb
    kinds = rotary.rope_type
    usual = logits(model, LIMIT - 1)
    with fixed_rotary(model):
        torch.testing.assert_close(logits(model, LIMIT)[:, :-1], usual)
        torch.testing.assert_close(logits(model, LONG)[:, : LIMIT - 1], usual)
        assert rotary.rope_type != kinds
    assert rotary.rope_type is kinds
    with pytest.raises(KeyError), fixed_rotary(model):
        raise KeyError
    assert rotary.rope_type is kinds
    # It changes again, as it did.
    assert not torch.allclose(logits(model, LONG)[:, : LIMIT - 1], usual, atol=1e-4)


# --- tables that never change --------------------------------------------------------------------

FIXED: dict[str, Callable[[], PreTrainedModel]] = {
    "yarn": lambda: tiny_llama(
        max_positions=128,
        rope_parameters={
            "rope_theta": 10000.0,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama3": lambda: tiny_llama(
        max_positions=128,
        rope_parameters={
            "rope_theta": 10000.0,
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "one for each kind of layer": lambda: family(
        "gemma3_text",
        rope_parameters={
            "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": dict(DEFAULT),
        },
    ),
}


@pytest.mark.parametrize("make", FIXED.values(), ids=FIXED)
def test_other_tables_are_captured_for_any_length(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    wanted = text(make(), 20, 60)
    with wrap(model, 60) as spec:
        assert torch.equal(spec.generate(prompt(20), max_new_tokens=40), wanted)
