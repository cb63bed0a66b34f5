"""Adapters are models of the server: listed, named by requests, and in their answers."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator

import pytest
from peft import PeftModel
from transformers import LlamaForCausalLM

from speccompile import Adapters
from speccompile.cli.session import parse_adapters, parse_heads
from speccompile.errors import InvalidOption
from support import serving
from support.errors import raises
from support.lora import lora_config, with_adapters
from support.serving import MODEL, Client

PROMPT, NEW = list(b"the end of it"), 12


@pytest.fixture(scope="module")
def adapted(target: LlamaForCausalLM) -> PeftModel:
    return with_adapters({"legal": lora_config(8)}, copy.deepcopy(target))


@pytest.fixture(scope="module")
def with_legal(target: LlamaForCausalLM, adapted: PeftModel) -> Iterator[Client]:
    with serving.speculator(target, mode="ngram", tiers=(0,), adapters=Adapters(1)) as spec:
        spec.add_adapter("legal", adapted)
        yield Client(serving.service(spec))


def test_they_are_listed_with_the_model_that_they_adapt(with_legal: Client) -> None:
    listed = with_legal.get("/v1/models").json()["data"]
    assert [(model["id"], model.get("parent")) for model in listed] == [(MODEL, None), ("legal", MODEL)]
    assert with_legal.get("/v1/models/legal").json()["parent"] == MODEL


def test_a_request_names_one_as_its_model(with_legal: Client) -> None:
    spec = with_legal.service.spec
    for name in (MODEL, "legal"):
        adapter = None if name == MODEL else name
        wanted = spec.engine.submit(PROMPT, max_new_tokens=NEW, adapter=adapter).result().token_ids
        answer = with_legal.complete(PROMPT, model=name, max_tokens=NEW)
        assert answer["model"] == name
        assert answer["choices"][0]["text"] == with_legal.service.tokenizer.decode(wanted, skip_special_tokens=True)
    texts = {with_legal.chat("the end", model=name)["choices"][0]["message"]["content"] for name in (MODEL, "legal")}
    assert len(texts) == 2
    body = {"model": "legal", "input": "the end", "temperature": 0, "max_output_tokens": 16}
    assert with_legal.post("/v1/responses", body).json()["model"] == "legal"


def test_the_metrics_name_the_adapters_of_running_requests(with_legal: Client) -> None:
    engine = with_legal.service.spec.engine
    held = engine.submit(PROMPT, max_new_tokens=200, adapter="legal")
    engine.step()
    try:
        text = with_legal.get("/metrics").text
    finally:
        held.cancel()
    assert 'vllm:lora_requests_info{max_lora="1",running_lora_adapters="legal",waiting_lora_adapters=""}' in text


def test_another_name_is_not_found(with_legal: Client) -> None:
    error = with_legal.refused("/v1/completions", {"model": "medical", "prompt": "a"}, 404)
    assert error["code"] == "model_not_found" and "'tiny', 'legal'" in error["message"]


def test_the_command_line_reads_names_and_folders() -> None:
    assert parse_adapters(["legal=a/b", "medical=c=d"]) == {"legal": "a/b", "medical": "c=d"}
    for wrong in (["legal"], ["=a"], ["legal="], ["legal=a", "legal=b"]):
        with raises(InvalidOption, name="--lora-modules", reason=re.compile("name=folder")):
            parse_adapters(wrong)


def test_heads_are_those_of_adapters_by_name() -> None:
    adapters = {"legal": "a", "medical": "b"}
    assert parse_heads(["medical=c"], adapters) == {"medical": "c"}
    with raises(InvalidOption, name="--lora-heads", reason=re.compile("no adapter is named 'other'; add")):
        parse_heads(["other=c"], adapters)
    with raises(InvalidOption, name="--lora-heads", reason=re.compile("name=folder")):
        parse_heads(["legal"], adapters)
