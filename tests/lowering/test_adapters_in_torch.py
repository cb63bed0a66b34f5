"""Adapters in compiled bodies that run on torch's own ops, as where the C++ ops cannot be built."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import speccompile
from speccompile import Adapters, wrap
from speccompile.backends import Inductor
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.lowering import backends
from speccompile.lowering.kernels import STOCK, Kernels
from support.lora import lora_config, own_text, with_adapters
from support.tiny import random_prompt, tiny_llama


class OnTorch(Inductor):
    def choose_kernels(self, info: ModelInfo) -> Kernels:
        return STOCK


@pytest.fixture
def on_torch() -> Iterator[str]:
    speccompile.register_backend("on_torch", OnTorch)
    yield "on_torch"
    del backends._own["on_torch"]


def test_adapters_run_in_compiled_bodies_without_the_cpp_ops(on_torch: str) -> None:
    adapted, prompt = with_adapters({"one": lora_config()}), random_prompt(9)
    with wrap(tiny_llama(), "ngram", backend=on_torch, tiers=(0, 3), max_len=64, adapters=Adapters(1)) as spec:
        spec.add_adapter("one", adapted)
        got = spec.engine.submit(prompt, max_new_tokens=10, adapter="one").result().token_ids
    assert got == own_text(adapted, "one", prompt, 10) != own_text(adapted, None, prompt, 10)
