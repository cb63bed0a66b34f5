"""The benchmarks beside other engines, and of builds: what is claimed, and what is reported where a peer is missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from benchmarks import build_time, peer_processes
from benchmarks.build_time import COLD, COMPILED, COMPILED_WARM, KERNELS, WARM
from benchmarks.compare import LOOKUP
from benchmarks.peer_processes import NOT_INSTALLED, PEERS, Peer, write_rounded
from benchmarks.peers import (
    DRAFTED,
    NGRAM,
    PLAIN,
    ROUNDED,
    chosen_prompts,
    claim_rows,
    claims_table,
    rates,
    rates_table,
)
from benchmarks.random_gguf import DEVIATION, random_blocks
from benchmarks.report import Comparison
from speccompile.cli.measure import TRANSFORMERS, Run, TokenTimer
from speccompile.cli.prompts import NamedPrompt
from speccompile.errors import InvalidOption
from support.errors import raises

PROMPTS = [NamedPrompt("1", "rag", "text"), NamedPrompt("2", "writing", "text")]


def runs(*seconds: float) -> list[Run]:
    """Of 11 tokens each: one in the first second, ten in the seconds after it."""
    return [Run([0] * 11, 1.0, 1.0 + each, 10, 10) for each in seconds]


def comparison() -> Comparison:
    lines = {
        TRANSFORMERS: runs(10, 10), LOOKUP: runs(5, 8), PLAIN: runs(4, 4), NGRAM: runs(2, 4),
        ROUNDED["int8"]: runs(2, 2),
    }  # fmt: skip
    return Comparison(PROMPTS, lines, {name: [] for name in lines}, {})


def test_claims_are_of_the_prompts_that_they_speak_of() -> None:
    found = {(row["claim"], row["prompts"]): (row["ratio"], row["wanted"]) for row in claim_rows(comparison())}
    assert found == {
        (f"{PLAIN} / {TRANSFORMERS}", "all"): (pytest.approx(2.5), 1.6),
        (f"{NGRAM} / {TRANSFORMERS}", "rag"): (pytest.approx(5.0), 2.5),
        (f"{NGRAM} / {LOOKUP}", "rag"): (pytest.approx(2.5), 1.5),
        (f"{ROUNDED['int8']} / {PLAIN}", "all"): (pytest.approx(2.0), 1.5),
    }
    assert claims_table(claim_rows(comparison())).row_count == 4


def test_rates_are_told_by_category_with_the_time_to_the_first_token() -> None:
    rows = {(row["line"], row["prompts"]): row for row in rates(comparison())}
    assert rows[NGRAM, "rag"]["decode_tokens_per_second"] == pytest.approx(5.0)
    assert rows[NGRAM, "all"]["decode_tokens_per_second"] == pytest.approx(20 / 6)
    assert rows[NGRAM, "writing"]["first_token_seconds"] == 1.0
    table = rates_table(comparison(), ["llama.cpp Q8_0"])
    assert table.row_count == 6 and list(table.columns[1].cells)[-1] == NOT_INSTALLED


def test_prompts_are_chosen_by_category(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [f'{{"question_id": {i}, "category": "{name}", "turns": ["text"]}}' for i, name in enumerate("abcabcab")]
    path.write_text("\n".join(lines))
    assert [prompt.name for prompt in chosen_prompts(path, ["b", "a"], 2)] == ["1", "4", "0", "3"]
    assert [prompt.name for prompt in chosen_prompts(path, [], 2)] == ["0", "1"]
    with raises(InvalidOption, name="--categories", reason=re.compile("no prompt is of that category")):
        chosen_prompts(path, ["a", "d"], 2)


def test_a_peer_that_is_missing_says_so(tmp_path: Path) -> None:
    # Of this Python nothing but the standard library is left.
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    for name in PEERS["int4"]:
        peer = Peer(name, str(bare), tmp_path / "model.gguf", 1, "int4")
        assert peer.installed is None
        peer.close()


def test_a_peer_answers_and_one_that_breaks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, sys\n"
        "print(json.dumps({'ready': 'it 1.0'}), flush=True)\n"
        "asked = json.loads(sys.stdin.readline())\n"
        "answer = {'tokens': [7] * asked['new'] + asked['eos'], 'first_seconds': 0.25, 'seconds': 1.0, 'passes': 2}\n"
        "print(json.dumps(answer), flush=True)\n"
        "sys.stdin.readline()\n"
        "sys.exit('no more of that')\n"
    )
    monkeypatch.setattr(peer_processes, "WORKER", worker)
    peer = Peer("llama.cpp", sys.executable, tmp_path / "model.gguf", 1, "int8")
    assert peer.installed == "it 1.0"
    variant, clock = peer.variant([2]), TokenTimer()
    assert variant.generate(torch.tensor([[5, 6]]), 3, clock).tolist() == [[5, 6, 7, 7, 7, 2]]
    assert (clock.first_seconds, clock.passes, clock.emitted) == (0.25, 2, 3)
    with pytest.raises(RuntimeError, match="no more of that"):
        variant.generate(torch.tensor([[5, 6]]), 3, clock)
    peer.close()


def test_a_comparison_without_transformers_refers_to_its_first_line() -> None:
    lines = {ROUNDED["int4"]: runs(2, 2), DRAFTED["int4"]: runs(1, 1), "llama.cpp Q4_0, lookup": runs(4, 4)}
    found = Comparison(PROMPTS, lines, {name: [] for name in lines}, {})
    assert [row["decode_ratio"] for row in found.rows()] == pytest.approx([1, 2, 0.5])
    assert claim_rows(found) == [
        {"claim": f"{DRAFTED['int4']} / llama.cpp Q4_0, lookup", "prompts": "all", "ratio": 4.0, "wanted": 1.0}
    ]


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0])
def test_random_blocks_have_the_deviation_of_weights(kind: GGMLQuantizationType) -> None:
    values = dequantize(random_blocks((64, 256), kind, np.random.default_rng(0)), kind)
    assert values.shape == (64, 256)
    assert values.std() == pytest.approx(DEVIATION, rel=0.05)


@pytest.mark.parametrize(("form", "error"), [("Q8_0", 0.02), ("Q4_0", 0.3)])
def test_a_model_is_rounded(tmp_path: Path, form: str, error: float) -> None:
    generator = np.random.default_rng(0)
    matrix, vector = generator.normal(size=(4, 64)).astype(np.float32), np.ones(64, np.float32)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b"])
    kind = GGMLQuantizationType.Q4_1
    for name in ("blk.0.matrix", "token_embd.weight"):
        writer.add_tensor(name, quantize(matrix, kind), raw_dtype=kind)
    writer.add_tensor("vector", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_rounded(tmp_path / "model.gguf", tmp_path / "rounded.gguf", GGMLQuantizationType[form])
    read = GGUFReader(tmp_path / "rounded.gguf")
    assert read.fields["llama.block_count"].contents() == 3
    assert read.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert read.fields["general.architecture"].contents() == "llama"
    tensors = {tensor.name: tensor for tensor in read.tensors}
    assert tensors["blk.0.matrix"].tensor_type == GGMLQuantizationType[form]
    assert tensors["token_embd.weight"].tensor_type == GGMLQuantizationType.Q8_0
    was = dequantize(quantize(matrix, kind), kind)
    for tensor, largest in ((tensors["blk.0.matrix"], error), (tensors["token_embd.weight"], 0.02)):
        assert np.abs(dequantize(tensor.data, tensor.tensor_type) - was).max() < largest
    assert (tensors["vector"].data == vector).all()


def test_claims_of_builds() -> None:
    seconds = {COLD: 30.0, WARM: 6.0, KERNELS: 20.0, COMPILED: 50.0, COMPILED_WARM: 20.0}
    measured = {name: {"seconds": each, "parts": {}} for name, each in seconds.items()}
    found = {row["claim"]: row["ratio"] for row in build_time.claims(measured)}
    assert found == {
        f"{COLD} / {COMPILED}": 0.6,
        f"{KERNELS} / {COMPILED}": 0.4,
        f"{WARM} / {COLD}": 0.2,
        f"{WARM} / {KERNELS}": 0.3,
    }
    times, ratios = build_time.tables(measured)
    assert times.row_count == 5 and list(ratios.columns[3].cells) == ["yes", "yes", "yes", "no"]
