"""The plan by which a model is loaded in parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from speccompile.utils.tensor_parallel import started_processes, tensor_parallel
from support.tiny import tiny_llama


@pytest.mark.parametrize(("kv_heads", "whole"), [(2, False), (1, True)])
def test_attention_is_whole_where_kv_heads_cannot_be_shared_out(tmp_path: Path, kv_heads: int, whole: bool) -> None:
    tiny_llama(kv_heads=kv_heads).config.save_pretrained(tmp_path)
    config = tensor_parallel(str(tmp_path), 2)
    parts = {f"model.layers.*.self_attn.{part}_proj": "replicate" for part in "qkvo"}
    assert config.tp_size == 2 and (config.tp_plan or {}) == (parts if whole else {})


def test_torchrun_says_how_many_processes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert started_processes() == 1
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert started_processes() == 3
