"""Checkpoints that are quantised already, from their files to the text: the model has no weights but the integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from speccompile import pretrained
from speccompile.ops.cpu.rounded import as_packed, inputs_unrounded
from speccompile.quantized.models import load_dequantized
from speccompile.runtime.check import transformers_greedy
from support.our_kernels import our_kernels
from support.packed_models import PROMPTS, wrapped
from support.quantized_folders import LAYOUTS, write_folder
from support.quantized_gguf import write_gguf
from support.tiny import tiny_llama

TEXTS = [PROMPTS[0].tolist(), PROMPTS[1, :9].tolist()]
LENGTH = 16
#: How each is written, and the forms that its linears have.
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "gptq": ({"config": {"desc_act": True}, "act_order": True}, {"int4"}),
    "awq": ({}, {"int4"}),
    "compressed-tensors": ({}, {"int4"}),
    "torchao": ({}, {"int4"}),
    "gguf": ({}, {"int4", "int8"}),
}


def written(name: str, folder: Path) -> Path:
    if name in LAYOUTS:
        write_folder(tiny_llama(), folder, name, **CASES[name][0])
        return folder
    # As a file of Q4_K_M: some weights, and the table of the vocabulary, have more bits.
    path = folder / "model.gguf"
    more = ("token_embd", "ffn_down", "attn_v")
    model = tiny_llama(layers=1, hidden=256, tie=True)
    write_gguf(model, path, lambda tensor: Kind.Q6_K if any(part in tensor for part in more) else Kind.Q4_K)
    return path


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_that_of_the_stored_integers(name: str, tmp_path: Path) -> None:
    path = written(name, tmp_path)
    model, weights = pretrained.load_quantized(path)
    with our_kernels() as backend:
        spec = wrapped(model, weights=weights, backend=backend)
    packs = spec._build.packs
    assert {pack.form.name for pack in packs if pack.format} == CASES[name][1]
    assert f"{len(weights)} of {weights.format} as stored" in spec.explain()
    # Observed over the integers. The model's own values are NaN, which tell nothing, and the check would read max_len.
    assert not spec._build.observed.counts
    # With inputs that are not rounded it is transformers' own forward over the dequantised weights: next to that of
    # float64 it is off as one of float32 is.
    with torch.no_grad():
        exact = load_dequantized(path).double()(PROMPTS).logits
        of_float32 = (load_dequantized(path)(PROMPTS).logits - exact).abs().max()
        with inputs_unrounded(packs):
            difference = (model(PROMPTS).logits - exact).abs().max()
    assert difference <= 4 * of_float32, (difference, of_float32)
    with as_packed(packs):
        texts = [transformers_greedy(model, text, LENGTH, []) for text in TEXTS]
    requests = [spec.engine.submit(text, max_new_tokens=LENGTH, eos_token_id=[]) for text in TEXTS]
    assert [request.result().token_ids for request in requests] == texts
