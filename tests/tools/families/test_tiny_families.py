"""Tiny random models of the families that transformers knows."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from speccompile.errors import CannotBeTiny, InvalidOption, SpecCompileError
from speccompile.tools.families import Family, causal_lm_families, find_families, tiny_config, tiny_model
from speccompile.tools.families.tiny import TEXT_VOCAB, VOCAB
from support.errors import raises

# fmt: off
FULL = [
    "llama", "gemma2", "gemma3_text", "phi3", "gpt2", "opt", "gpt_neox", "gpt_oss", "mixtral",
    "deepseek_v3", "glm4", "smollm3", "bloom", "falcon", "llama4_text", "gptj", "mpt",
    "cohere2", "qwen2", "qwen3",
]
# fmt: on
# The first token is out of reach at the end: of all windows, or of a state that forgets.
BOUNDED = ["mistral", "qwen3_moe", "mamba2", "qwen3_next"]
NAMES = [*FULL, *BOUNDED]

WINDOWED = {"qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe", "cohere2"}
KINDS = {
    "gemma2": {"sliding_attention", "full_attention"},
    "gemma3_text": {"sliding_attention", "full_attention"},
    "gpt_oss": {"sliding_attention", "full_attention"},
    "cohere2": {"sliding_attention", "full_attention"},
    "qwen2": {"sliding_attention", "full_attention"},
    "qwen3": {"sliding_attention", "full_attention"},
    "llama4_text": {"chunked_attention", "full_attention"},
    "qwen3_next": {"linear_attention", "full_attention"},
}
LENGTH = 48


def family(name: str) -> Family:
    return find_families([name])[0]


@functools.cache
def tiny(name: str) -> PreTrainedModel:
    return tiny_model(family(name))


def text(seed: int = 0) -> torch.Tensor:
    return torch.randint(TEXT_VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(ids).logits
    return out[0]


def test_every_family_that_transformers_maps_is_listed_once_and_in_order() -> None:
    names = [family.name for family in causal_lm_families()]
    assert names == sorted(set(names))
    assert set(NAMES) <= set(names)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_small_and_in_eval_mode(name: str) -> None:
    model = tiny(name)
    assert sum(weight.numel() for weight in model.parameters()) < 1_000_000
    assert not model.training
    assert model.config.eos_token_id is None
    assert model.generation_config.eos_token_id is None


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_finite_and_none_is_alike(name: str) -> None:
    out = logits(tiny(name), text())
    assert out.shape == (LENGTH, VOCAB)
    assert out.isfinite().all()
    assert len(set(out.argmax(-1).tolist())) > 10


@pytest.mark.parametrize("name", FULL)
def test_the_first_token_changes_the_last_logits(name: str) -> None:
    ids = text()
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 17) % TEXT_VOCAB
    before, after = logits(tiny(name), ids)[-1], logits(tiny(name), other)[-1]
    assert (before - after).abs().max() > 0.01 * before.std()


@pytest.mark.parametrize("name", NAMES)
def test_the_newest_token_alone_does_not_decide(name: str) -> None:
    ids, other = text(0), text(1)
    other[0, -1] = ids[0, -1]
    before, after = logits(tiny(name), ids)[-1], logits(tiny(name), other)[-1]
    assert (before - after).std() > 0.1 * before.std()


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_and_the_random_state_of_the_caller_is_left_alone(name: str) -> None:
    state = torch.random.get_rng_state()
    again, other = tiny_model(family(name)), tiny_model(family(name), seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    weights = again.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in tiny(name).state_dict().items())
    assert not torch.equal(logits(again, text()), logits(other, text()))


@pytest.mark.parametrize("name", sorted(WINDOWED))
def test_windows_are_shorter_than_texts(name: str) -> None:
    assert tiny_config(family(name)).sliding_window == 8
    assert tiny_config(family(name), window=5).sliding_window == 5


def test_a_window_is_in_force() -> None:
    ids = text()
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 17) % TEXT_VOCAB
    # Two layers of 8 see at most 15 tokens.
    assert torch.equal(logits(tiny("mistral"), ids)[16:], logits(tiny("mistral"), other)[16:])


@pytest.mark.parametrize("name", sorted(KINDS))
def test_each_kind_of_layer_occurs(name: str) -> None:
    config = tiny_config(family(name))
    assert set(config.layer_types) == KINDS[name]
    assert config.num_hidden_layers == len(config.layer_types)


def test_kinds_that_are_not_layer_types() -> None:
    assert set(tiny_config(family("smollm3")).no_rope_layers) == {0, 1}
    assert tiny_config(family("llama4_text")).attention_chunk_size == 8
    deepseek = tiny_config(family("deepseek_v3"))
    assert 0 < deepseek.first_k_dense_replace < deepseek.num_hidden_layers
    assert deepseek.qk_nope_head_dim + deepseek.qk_rope_head_dim != deepseek.v_head_dim


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "qwen3_next"])
def test_more_layers_and_other_sizes_can_be_asked_for(name: str) -> None:
    config = tiny_config(family(name), num_layers=5, max_position_embeddings=512)
    assert config.num_hidden_layers == 5
    assert config.max_position_embeddings == 512


@pytest.mark.parametrize("overrides", [{"no_such_size": 1}, {"num_hidden_layers": 3}])
def test_an_unknown_size_is_refused(overrides: dict[str, Any]) -> None:
    with raises(InvalidOption, reason=re.compile("not a size of this family")):
        tiny_config(family("llama"), **overrides)


def test_the_dtype_is_that_of_all_weights() -> None:
    model = tiny_model(family("llama"), dtype=torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert logits(model, text()).isfinite().all()


def test_a_tied_output_layer_is_left_as_it_is() -> None:
    model = tiny_model(family("llama"), tie_word_embeddings=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_what_cannot_be_made_says_why() -> None:
    with raises(CannotBeTiny, family="gemma4_assistant", reason=re.compile("hidden_size_per_layer_input")):
        tiny_model(family("gemma4_assistant"))
    assert issubclass(CannotBeTiny, SpecCompileError)


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3"])
def test_greedy_text_repeats_itself_in_part(name: str) -> None:
    pattern = torch.arange(7, 13).repeat(7)[None, :40]
    out = tiny(name).generate(pattern, attention_mask=torch.ones_like(pattern), do_sample=False, max_new_tokens=48)
    tokens = out[0].tolist()
    seen = [tokens[i - 2 : i] in [tokens[k : k + 2] for k in range(i - 2)] for i in range(40, len(tokens))]
    assert len(tokens) == 88
    assert any(seen)
