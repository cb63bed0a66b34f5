"""One tiny model and one arena for all files of this folder; every test has an engine of its own over them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import speccompile
from speccompile import Speculator
from speccompile.runtime.engine import Engine
from support.engines import VOCAB, Bench, Make, time_limit
from support.letters import tokenizer
from support.tiny import tiny_llama


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    yield from time_limit()


@functools.cache
def shared_model() -> LlamaForCausalLM:
    return tiny_llama(vocab=VOCAB)


@functools.cache
def shared_bench() -> Bench:
    return Bench(shared_model())


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    """The shared model, or a separate one with the sizes of ``TINY`` of the test file."""
    own = getattr(request.module, "TINY", None)
    return shared_model() if own is None else tiny_llama(**own)


@pytest.fixture(scope="module")
def bench(model: LlamaForCausalLM) -> Bench:
    return shared_bench() if model is shared_model() else Bench(model)


@pytest.fixture
def make(bench: Bench) -> Iterator[Make]:
    yield from bench.maker()


@pytest.fixture
def engine(make: Make) -> Engine:
    return make().engine


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    return tokenizer()


@pytest.fixture(scope="module")
def shared(model: LlamaForCausalLM) -> Speculator:
    """The wrap that ``spec`` returns."""
    return speccompile.wrap(model, "ngram", tiers=(0, 3), max_batch=2, max_len=64, backend="eager")


@pytest.fixture
def spec(shared: Speculator, model: LlamaForCausalLM) -> Iterator[Speculator]:
    """A wrap of two slots; its model's ``generation_config`` is empty. Some files define their own ``spec``."""
    before = model.generation_config
    model.generation_config = GenerationConfig()
    yield shared
    model.generation_config = before
