"""Functions of a model's files that other code has replaced."""

from __future__ import annotations

import pytest
from transformers.models.llama import modeling_llama

from speccompile.graph_capture.replaced_code import replaced_code
from support.families import family
from support.tiny import tiny_llama


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma2", "gpt_oss"])
def test_families_run_the_code_of_their_files(name: str) -> None:
    assert replaced_code(family(name)) is None


def test_a_replaced_function_or_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    for owner, name, says in (
        (modeling_llama, "apply_rotary_pos_emb", "apply_rotary_pos_emb"),
        (modeling_llama.LlamaMLP, "forward", "LlamaMLP.forward"),
        (modeling_llama, "LlamaRMSNorm", "LlamaRMSNorm.__init__"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *_: None)
            assert replaced_code(model) == f"transformers.models.llama.modeling_llama.{says}"
    assert replaced_code(model) is None
