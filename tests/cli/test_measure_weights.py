"""``speccompile measure-weights``."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from speccompile.cli import app
from speccompile.cli.measure_weights import perplexities, perplexity
from speccompile.lowering.kernels import Kernels
from speccompile.ops.cpu.library import load_cpu_ops
from support.families import model_of


def test_perplexity_is_that_of_its_definition() -> None:
    """A model over four tokens to which the next one has the probability 1/2, the others 1/6."""

    def forward(input_ids: torch.Tensor, use_cache: bool) -> Any:
        shares = torch.full((1, input_ids.shape[1], 4), 1 / 6)
        shares.scatter_(2, ((input_ids + 1) % 4)[..., None], 1 / 2)
        return SimpleNamespace(logits=shares.log())

    counting = torch.arange(11) % 4
    assert perplexity(forward, counting, 5) == pytest.approx(2.0)
    # Of the ten predicted tokens the last is another one.
    counting[10] = 0
    assert perplexity(forward, counting, 5) == pytest.approx(math.exp((9 * math.log(2) + math.log(6)) / 10))


def test_all_forms_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_cpu_ops("rounded") is None
    # The ops without compiled bodies around them.
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: Kernels(True, "for the test"))
    text = tmp_path / "text"
    text.write_text("one two three four five six seven eight nine ten " * 4)
    result = CliRunner().invoke(
        app, ["measure-weights", "tiny", "--text", str(text), "--window", "32", "--backend", "eager"]
    )
    assert result.exit_code == 0, result.output
    names = "float32|int8|int4|kv=bfloat16|kv=float16|bfloat16"
    found = dict(re.findall(rf"({names})[ │]+([\d.]+)", result.stdout))
    assert "|".join(found) == names
    distance = {form: abs(float(value) / float(found["float32"]) - 1) for form, value in found.items()}
    assert 0 < distance["int8"] < distance["int4"] < 0.5


def test_a_model_without_keys_and_values_has_the_other_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: Kernels(True, "for the test"))
    found = dict(perplexities(model_of("mamba"), torch.arange(5, 38), 16, None, "eager"))
    assert list(found) == ["float32", "int8", "int4", "bfloat16"]


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("short")
    result = CliRunner().invoke(app, ["measure-weights", "tiny", "--text", str(text), "--window", "32"])
    assert result.exit_code == 2 and "it has 5 tokens, and a window of 32 needs 33" in result.stderr
