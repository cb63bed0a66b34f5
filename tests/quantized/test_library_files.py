"""Linears that the formats' own libraries packed have the libraries' bits.

The script that wrote the files, with its environment: ``git show 2d17e84:tests/support/make_quantized_golden.py``.
Those of FP4 are of compressed-tensors 0.20.1: ``MXFP4PackedCompressor`` and ``NVFP4PackedCompressor``, and its
``dequantize`` in float32. Zeros of their digests have no sign.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from speccompile.quantized import GroupedWeight
from speccompile.quantized.files import TensorFiles
from speccompile.quantized.reading import READERS
from speccompile.quantized.source import TensorSource

GOLDEN = sorted(Path(__file__).with_name("golden").glob("*.safetensors"), key=lambda file: file.stem)
#: The form of each: bits and group of the values, and whether there are minimums and an order of inputs.
FORMS = {
    "awq-group32": (4, 32, True, False),
    "awq-group64": (4, 64, True, False),
    "compressed-int8-asym": (8, 64, True, False),
    "compressed-int8-channel": (8, 64, False, False),
    "compressed-int8-tensor": (8, 64, False, False),
    "compressed-mxfp4": (6, 32, False, False),
    "compressed-nvfp4": (6, 16, False, False),
    "compressed-pack3-sym": (4, 32, False, False),
    "compressed-pack4-asym": (4, 16, True, False),
    "compressed-pack4-sym": (4, 32, False, False),
    "compressed-pack8-channel": (8, 64, False, False),
    "gptq2-asym": (4, 32, True, False),
    "gptq3-asym": (4, 32, True, False),
    "gptq4-asym": (4, 32, True, False),
    "gptq4-asym-actorder": (4, 32, True, True),
    "gptq4-asym-column": (4, 64, True, False),
    "gptq4-sym": (4, 32, False, False),
    "gptq4-v2-asym": (4, 32, True, False),
    "gptq4-v2-asym-actorder": (4, 32, True, True),
    "gptq4-v2-asym-column": (4, 64, True, False),
    "gptq8-asym": (8, 32, True, False),
    "gptq8-sym": (8, 32, False, False),
    "torchao-int4-asym": (6, 32, False, False),
    "torchao-int4-sym": (4, 32, False, False),
    "torchao-int8-asym-bfloat16": (8, 32, True, False),
    "torchao-int8-row": (8, 64, False, False),
    "torchao-int8-tensor": (8, 64, False, False),
}


def read(file: Path, folder: Path) -> tuple[GroupedWeight, str]:
    """The weight, and the digest of the library's."""
    shutil.copyfile(file, folder / "model.safetensors")
    with safe_open(file, framework="pt") as tensors:
        metadata = tensors.metadata()
    source = TensorSource(file.stem)
    config = json.loads(metadata["quantization_config"])
    weights, used, _ = READERS[config["quant_method"]](TensorFiles(folder, source), config, source)
    assert used >= set(TensorFiles(folder, source))
    assert [*weights] == ["linear.weight"]
    return weights["linear.weight"](), metadata["digest"]


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_a_linear_has_the_bits_of_its_library(file: Path, tmp_path: Path) -> None:
    weight, digest = read(file, tmp_path)
    assert hashlib.sha256(weight.dequantize().contiguous().numpy().tobytes()).hexdigest() == digest
    form = (weight.bits, weight.group, weight.minimums is not None, weight.order is not None)
    assert form == FORMS[file.stem]


def test_each_form_has_a_file() -> None:
    assert [file.stem for file in GOLDEN] == sorted(FORMS)
