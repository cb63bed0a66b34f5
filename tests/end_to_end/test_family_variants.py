"""What may vary within a family: dtype, tied embeddings, loading with a device map, a vision tower; and the model stays
the user's own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

import speccompile
from speccompile import Speculator
from speccompile.tools.families.tiny import Family, tiny_model
from support.families import NEW_TOKENS, SIZES, TIERS, assert_texts, greedy, model_of, periodic, speculative


def wrap(model: PreTrainedModel, **options: Any) -> Speculator:
    """For two rows, as in test_family_texts.py, whose steps are found again where the model is one of those."""
    given: dict[str, Any] = SIZES | {"max_batch": 2, "tiers": TIERS, "policy": f"fixed:{max(TIERS)}"} | options
    return speccompile.wrap(model, "ngram", **given)


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [periodic(seed=2)[:38], rng.choices(range(5, 120), k=21)]


def settings(model: PreTrainedModel) -> list[tuple[str, str, str | None]]:
    """The config of every module, with its choice of attention and experts."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return [
        (config.to_json_string(), config._attn_implementation, config._experts_implementation)
        for config in configs
        if isinstance(config, PreTrainedConfig)
    ]


@pytest.mark.parametrize("name", ["gemma2", "mixtral", "gpt_oss", "deepseek_v3", "bloom", "gemma3"])
def test_the_model_stays_as_it_was(name: str) -> None:
    model = model_of(name)
    before, addresses = settings(model), {path: tensor.data_ptr() for path, tensor in model.state_dict().items()}
    weights = {path: tensor.clone() for path, tensor in model.state_dict().items()}
    wanted = [greedy(model, prompt) for prompt in prompts()]
    spec = wrap(model)
    assert settings(model) == before
    assert [greedy(model, prompt) for prompt in prompts()] == wanted
    assert speculative(spec, prompts()) == wanted
    spec.close()
    assert settings(model) == before
    assert [greedy(model, prompt) for prompt in prompts()] == wanted
    assert all(torch.equal(tensor, weights[path]) for path, tensor in model.state_dict().items())
    assert {path: tensor.data_ptr() for path, tensor in model.state_dict().items()} == addresses
    assert all(parameter.requires_grad for parameter in model.parameters()) and not model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_either_attention_setting_is_served_and_kept(name: str, implementation: str) -> None:
    model = model_of(name)
    model.set_attn_implementation(implementation)
    with wrap(model) as spec:
        assert_texts(spec, model, prompts())
    assert model.config._attn_implementation == implementation


def test_a_family_whose_settings_differ_is_served_by_the_users_own() -> None:
    # transformers adds Falcon's ALiBi once by its sdpa branch and twice by its eager one.
    model = model_of("falcon", alibi=True)
    with wrap(model) as spec:
        assert spec.route == "eager"
        assert_texts(spec, model, prompts())


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2", "opt", "bloom", "smollm3"])
def test_embeddings_tied_where_others_are_untied_and_the_other_way_round(name: str) -> None:
    """As a family's own default has it, they are in test_families.py."""
    tied = not model_of(name).config.tie_word_embeddings
    model = model_of(name, tie_word_embeddings=tied, num_layers=1)
    shared = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert shared == tied
    with wrap(model) as spec:
        assert_texts(spec, model, prompts())


# Both dtypes by either route to attention, and for experts: bloom and deepseek_v3 go by the other one.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3", torch.float16),
        ("gemma3_text", torch.bfloat16),
        ("gpt2", torch.float16),
        ("bloom", torch.bfloat16),
    ],
)
def test_in_half_precision_only_near_ties_fall_the_other_way(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype=dtype)
    with torch.no_grad():
        largest = float(model(torch.tensor(prompts()[:1])).logits.abs().max())
    with wrap(model) as spec:
        report = spec.check(prompts(), max_new_tokens=NEW_TOKENS)
        assert spec.stats.accepted_tokens > 0
    # A few units in the last place of the largest logit.
    assert report.largest_logit_change <= 4 * torch.finfo(dtype).eps * largest


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mixtral", torch.float16), ("gpt_oss", torch.bfloat16), ("deepseek_v3", torch.float16)],
)
def test_experts_run_in_half_precision(name: str, dtype: torch.dtype) -> None:
    # A router that is almost undecided takes another expert at the least change, so texts are not compared.
    with wrap(model_of(name, dtype=dtype)) as spec:
        assert [len(text) for text in speculative(spec, prompts())] == [NEW_TOKENS] * 2
        assert spec.stats.accepted_tokens > 0


def test_a_model_loaded_with_a_device_map(tmp_path: Path) -> None:
    model_of("qwen2").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}).eval()
    with wrap(model) as spec:
        assert_texts(spec, model, prompts())
    assert len(greedy(model, prompts()[1])) == NEW_TOKENS


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "smolvlm", "gemma3", "llama4"])
def test_of_a_vision_language_model_the_text_model_is_captured(name: str) -> None:
    config_class = CONFIG_MAPPING[name]
    family = Family(name, config_class, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class])
    # Of one layer where all are of one kind.
    model = tiny_model(family, num_layers=1)
    with wrap(model) as spec:
        assert_texts(spec, model, prompts())
        paths = [port.path for port in spec.stages["outline"].graph.ports.values() if port.path]
        assert not any("vision" in path for path in paths)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_do_not_mix_rows(name: str) -> None:
    """A row's logits are the same bits whatever the other row reads, right or wrong drafts included."""
    model = model_of(name)
    with wrap(model) as spec:
        stage = spec.stages["outline"]
        inputs = dict(zip([node.name for node in stage.graph.placeholders], stage.make_inputs(), strict=True))
        logits = []
        for other in (3, 77):
            fresh = {key: value.clone() for key, value in inputs.items()}
            for key in ("input_ids", "position_ids", "row_slots"):
                fresh[key] = fresh[key][:2]
            fresh["input_ids"][1] = other
            (found,) = stage.call(*fresh.values())
            logits.append(found)
        assert torch.equal(logits[0][0], logits[1][0])
        assert not torch.equal(logits[0][1], logits[1][1])
