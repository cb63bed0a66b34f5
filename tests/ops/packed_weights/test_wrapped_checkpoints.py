"""Checkpoints of every format that is read, wrapped without their weights' values in float."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from speccompile import pretrained
from speccompile.ops.cpu.rounded import as_packed, inputs_unrounded
from speccompile.runtime.check import transformers_greedy
from support.packed_models import wrapped
from support.quantized import TEXTS, random_tiers
from support.quantized_checkpoints import FORMATS, written

LENGTH = 20


@pytest.mark.parametrize("name", FORMATS)
def test_the_text_is_that_of_the_checkpoints_integers(name: str, tmp_path: Path) -> None:
    path, reference = written(name, tmp_path)
    model, weights = pretrained.load_quantized(path)
    spec = wrapped(model, weights=weights)
    assert f"{len(weights)} of {weights.format} as stored" in spec.explain()
    packs = spec._build.packs
    # Inputs that are not rounded: transformers' own forward over the dequantised model.
    ids = torch.tensor(TEXTS[:1])
    with torch.no_grad(), inputs_unrounded(packs):
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-4)
    with as_packed(packs):
        expected = [transformers_greedy(model, text, LENGTH, []) for text in TEXTS]
    assert random_tiers(spec, LENGTH, seed=1) == expected
    if name == "gguf":
        # As llama.cpp stores them: scales of K-quants take no float32.
        assert all(pack.tensors[1].dtype == torch.uint8 for pack in packs if pack.format)
