"""The parts of a recorded step: which call belongs to which, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import step_parts
from benchmarks.step_parts import parts_of

LAYER = ["fused_int4_linears", "native_rotary_attention", *["fused_int4_linears"] * 3]


def test_linears_are_told_apart_by_their_place() -> None:
    names = ["step_inputs", "int8_embedding", *LAYER, *LAYER, "calls from Python", "int8_linear", "choose"]
    parts = parts_of([(name, index / 1e3) for index, name in enumerate(names)])
    assert {name: round(value) for name, value in parts.items()} == {
        "inputs": 0,
        "embedding": 1,
        "queries, keys, values": 2 + 7,
        "attention": 3 + 8,
        "attention output": 4 + 9,
        "gate and up": 5 + 10,
        "down": 6 + 11,
        "calls from Python": 12,
        "lm_head": 13,
        "choosing": 14,
    }


def test_it_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "parts.json"
    step_parts.main("tiny", tiers="0,3", weights="same", contexts="20,40", repeats=2, json_file=file)
    assert "gate and up" in capsys.readouterr().out
    parts = json.loads(file.read_text())["parts"]
    assert list(parts) == [f"K={draft_len}, context {context}" for context in (20, 40) for draft_len in (0, 3)]
    assert all(found["step"] > 0 and found["attention"] > 0 for found in parts.values())
