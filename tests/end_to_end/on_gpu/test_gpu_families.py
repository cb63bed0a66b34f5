"""Families on a GPU: windows and a soft cap, norms of queries, experts, sinks. Texts are transformers' on the CPU."""

from __future__ import annotations

import pytest

from support.gpu_texts import assert_family

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "mixtral", "gpt_oss", "phi3"])
def test_text_of_a_family(name: str) -> None:
    assert_family(name, "attention")
