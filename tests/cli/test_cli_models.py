"""Models by the names that commands take."""

from __future__ import annotations

from pathlib import Path

import pytest

from speccompile.cli.models import load_model
from support.quantized_folders import write_folder
from support.tiny import tiny_llama


def test_commands_report_that_quantised_weights_are_dequantised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tiny_llama(), tmp_path, "gptq")
    assert load_model(str(tmp_path)).model.layers[0].mlp.up_proj.weight.shape == (128, 64)
    assert f"the weights of {tmp_path} are dequantised to float32" in capsys.readouterr().err
