"""One tiny model and one arena for each test file; every test has an engine of its own over them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from speccompile.runtime.engine import Engine
from support.engines import VOCAB, Bench, Make, time_limit
from support.letters import tokenizer
from support.tiny import tiny_llama


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    yield from time_limit()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=VOCAB)


@pytest.fixture(scope="module")
def bench(model: LlamaForCausalLM) -> Bench:
    return Bench(model)


@pytest.fixture
def make(bench: Bench) -> Iterator[Make]:
    yield from bench.maker()


@pytest.fixture
def engine(make: Make) -> Engine:
    return make().engine


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    return tokenizer()
