"""Models of GGUF files: their values, and the integers that a step reads as they are stored."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers
from typer.testing import CliRunner

from speccompile import pretrained
from speccompile.cli import app, generate, inspect
from speccompile.cli.measure_weights import of_stored, perplexity
from speccompile.compiler.options import WrapOptions
from support.our_kernels import our_kernels

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCAB = 64, 128, 4, 2, 16, 257
SHAPES = {
    "attn_q": (HEADS * HEAD, HIDDEN),
    "attn_k": (KV_HEADS * HEAD, HIDDEN),
    "attn_v": (KV_HEADS * HEAD, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
QUANTIZED = GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray[Any, Any]]:
    """A Llama of one layer in Q8_0 over bytes, and the weight of its ``ffn_up``."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    generator = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"])
    writer.add_token_merges(["a b"])
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, generator.normal(size=(VOCAB, HIDDEN)).astype(np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    up = np.empty(0)
    for name, shape in SHAPES.items():
        packed = quantize(generator.normal(scale=0.15, size=shape).astype(np.float32), QUANTIZED)
        writer.add_tensor(f"blk.0.{name}.weight", packed, raw_dtype=QUANTIZED)
        up = dequantize(packed, QUANTIZED) if name == "ffn_up" else up
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, up


def test_weights_of_a_gguf_file_are_dequantised(gguf_file: tuple[Path, np.ndarray[Any, Any]]) -> None:
    path, up = gguf_file
    model, tokenizer = pretrained.load(str(path))
    assert model.dtype is torch.float32
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, torch.from_numpy(up))
    assert len(tokenizer("abc")["input_ids"]) == 2
    assert getattr(model.config, "quantization_config", None) is None


def test_generate_reads_a_gguf_file_and_says_what_it_does(gguf_file: tuple[Path, np.ndarray[Any, Any]]) -> None:
    path, _ = gguf_file
    options = ["--tiers", "0,1", "--backend", "eager", "--max-len", "64", "--max-new-tokens", "4"]
    result = CliRunner().invoke(app, ["generate", str(path), "--prompt", "abc", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert f"note: the weights of {path} are dequantised to float32; generate, serve and inspect" in result.stderr
    assert "4 tokens in " in result.stdout


def test_generate_runs_the_stored_integers(
    gguf_file: tuple[Path, np.ndarray[Any, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = gguf_file
    with our_kernels() as backend:
        options = WrapOptions(mode="ngram", tiers=(0, 1), backend=backend, max_len=64)
        generate.run(str(path), "abc", options, None, {"max_new_tokens": 4}, chat=None, stored=True)
    shown = capsys.readouterr()
    assert "4 tokens in " in shown.out
    assert "dequantised" not in shown.err


def test_inspect_shows_the_stored_integers(
    gguf_file: tuple[Path, np.ndarray[Any, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = gguf_file
    shown = {"stage": None, "measure": False, "html": None, "as_json": True, "new_tokens": 8, "trace": None}
    with our_kernels() as backend:
        options = WrapOptions(mode="none", tiers=(0,), backend=backend, max_len=64)
        inspect.run(str(path), options, None, draft_len=0, build=True, prompts=None, stored=True, **shown)
    assert re.search(r"\d+ of GGUF [^;]*as stored", capsys.readouterr().out)
    result = CliRunner().invoke(app, ["inspect", str(path), "--weights", "stored", "--no-build"])
    assert result.exit_code == 2 and "leave out --no-build, or --weights" in result.stderr


def test_the_perplexity_of_stored_integers_is_about_that_of_their_values(
    gguf_file: tuple[Path, np.ndarray[Any, Any]],
) -> None:
    path, _ = gguf_file
    ids = torch.randint(0, VOCAB, (65,), generator=torch.Generator().manual_seed(0))
    with our_kernels() as backend:
        form, value = of_stored(str(path), ids, 32, backend)
    assert form == "GGUF Q8_0, stored"
    assert value == pytest.approx(perplexity(pretrained.load_model(str(path)), ids, 32), rel=0.02)


def test_a_checkpoint_that_is_not_quantised_has_no_stored_integers() -> None:
    result = CliRunner().invoke(app, ["generate", "tiny", "--prompt", "abc", "--weights", "stored"])
    assert result.exit_code == 2
    assert "tiny is not a checkpoint of integers on this machine" in result.stderr
