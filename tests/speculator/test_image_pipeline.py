"""``pipeline("image-text-to-text", model=spec)`` gives the text of the model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import LlavaProcessor, PreTrainedModel, pipeline

import speccompile
from speccompile import Speculator
from support import letters
from support.vision_processor import model_of, picture, processor_of

TASK: Any = "image-text-to-text"
OPTIONS = {"generate_kwargs": {"do_sample": False, "max_new_tokens": 12}}


@pytest.fixture(scope="module")
def processor() -> LlavaProcessor:
    return processor_of(letters.tokenizer())


@pytest.fixture(scope="module")
def model(processor: LlavaProcessor) -> PreTrainedModel:
    return model_of(processor)


@pytest.fixture(scope="module")
def spec(model: PreTrainedModel) -> Iterator[Speculator]:
    with speccompile.wrap(model, "ngram", tiers=(0, 3), max_batch=2, max_len=96, backend="eager") as spec:
        yield spec


def chat(*seeds: int) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": picture(seed)} for seed in seeds]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "abcd"}]}]


@pytest.mark.parametrize(
    "given",
    [
        {"text": chat(1, 2)},
        {"text": [chat(1), chat(2, 3)], "batch_size": 2},
        {"images": [picture(1), picture(2)], "text": ["<image>ab", "hgfhgf<image>a"]},
        {"text": "abcabc"},
    ],
    ids=["a chat", "chats", "prompts", "text"],
)
def test_a_pipeline_gives_transformers_text(
    spec: Speculator, model: PreTrainedModel, processor: LlavaProcessor, given: dict[str, Any]
) -> None:
    ours, theirs = (pipeline(TASK, model=each, processor=processor, device="cpu") for each in (spec, model))
    found = ours(**given, **OPTIONS)
    assert found == theirs(**given, **OPTIONS)


def test_a_pipeline_logs_no_error(
    spec: Speculator, processor: LlavaProcessor, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        pipeline(TASK, model=spec, processor=processor, device="cpu")
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_speculator_has_the_modalities_of_its_model(spec: Speculator) -> None:
    assert spec.input_modalities == ("image", "text")
