"""Token ids that only stand for images, video or audio are refused in prompts without such input."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from transformers import (
    Gemma3Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2AudioConfig,
)

import speccompile
from speccompile import Speculator
from speccompile.errors import InvalidOption, PlaceholderToken
from speccompile.multimodal.model_inputs import placeholder_tokens
from support.errors import raises

IMAGE, VIDEO, VISION_START = 100, 101, 102


TINY = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": VISION_START}


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM) -> Iterator[Speculator]:
    with speccompile.wrap(model, "none", tiers=(0,), max_batch=2, max_len=32, backend="eager") as spec:
        yield spec


@pytest.mark.parametrize(("token", "name"), [(IMAGE, "config.image_token_id"), (VIDEO, "config.video_token_id")])
def test_a_prompt_with_one_is_refused_by_name(spec: Speculator, token: int, name: str) -> None:
    for decode in (
        lambda: spec.generate(torch.tensor([[5, 6, 7], [5, token, 7]]), max_new_tokens=2),
        lambda: spec.engine.submit([5, token, 7]),
        lambda: spec.check([[5, token, 7]], max_new_tokens=2),
    ):
        with raises(PlaceholderToken, position=1, token=token, name=name):
            decode()
    assert spec.engine.idle


def test_markers_and_padding_are_no_placeholders(spec: Speculator, model: LlamaForCausalLM) -> None:
    ids, mask = torch.tensor([[IMAGE, VISION_START, 6]]), torch.tensor([[0, 1, 1]])
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=4)
    assert torch.equal(spec.generate(ids, mask, max_new_tokens=4), expected)


def test_images_themselves_are_refused_by_name(spec: Speculator) -> None:
    """Of a model whose forward has such an input; otherwise the name is unknown."""
    with raises(
        InvalidOption, name="inputs_embeds", reason=re.compile("no model inputs except input_ids and attention_mask")
    ):
        spec.generate(torch.tensor([[5, 6]]), inputs_embeds=torch.zeros(1, 1, 2))


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (LlavaConfig(), {"config.image_token_index"}),
        (Gemma3Config(), {"config.image_token_index"}),
        (Qwen2_5_VLConfig(), {"config.image_token_id", "config.video_token_id"}),
        (Qwen2AudioConfig(), {"config.audio_token_index"}),
        (LlamaConfig(), set()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_configs_of_transformers_name_theirs(config: PreTrainedConfig, names: set[str]) -> None:
    assert {name.replace("_id", "_index") for name in placeholder_tokens(config).values()} == {
        name.replace("_id", "_index") for name in names
    }
