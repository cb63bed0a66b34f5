"""Checkpoints of every format that is read, wrapped without their weights' values in float."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from speccompile import pretrained, wrap
from speccompile.acceptance import Forced
from speccompile.heads import Eagle3Head, save_eagle3
from speccompile.ops.cpu.rounded import as_packed, inputs_unrounded
from speccompile.runtime.check import transformers_greedy
from support.packed_models import wrapped
from support.quantized import TEXTS, random_tiers
from support.quantized_checkpoints import FORMATS, written
from support.quantized_gguf import write_gguf
from support.tiny import tiny_llama

LENGTH = 20
F32, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0


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


def test_a_head_shares_an_embedding_of_integers(tmp_path: Path) -> None:
    """The text consists of its drafts, which are those over the same weights in float."""
    target = tiny_llama(layers=4)
    save_eagle3(Eagle3Head.random(target, taps=(0, 1, 2)), tmp_path / "head")
    write_gguf(target, tmp_path / "model.gguf", lambda name: Q8_0 if name.endswith("embd.weight") else F32)
    texts = []
    for stored in (True, False):
        options: dict[str, Any] = {"draft": str(tmp_path / "head"), "draft_weights": "same", "acceptance": Forced(2)}
        if stored:
            model, options["weights"] = pretrained.load_quantized(tmp_path / "model.gguf")
        else:
            model = pretrained.load_model(str(tmp_path / "model.gguf"))
        options |= {"tiers": (0, 3), "policy": "fixed:3", "max_len": 60, "max_batch": 1, "backend": "eager"}
        with wrap(model, "eagle3_one_model", **options) as spec:
            request = spec.engine.submit(TEXTS[0], max_new_tokens=LENGTH, eos_token_id=[])
            texts.append(request.result().token_ids)
    assert texts[0] == texts[1]
