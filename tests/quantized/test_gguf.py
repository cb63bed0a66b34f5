"""GGUF files of tiny Llamas: integers by transformers' names and row order, and errors for what is not read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from speccompile import quantized
from speccompile.errors import DamagedCheckpoint, PretrainedError, UnsupportedCheckpoint
from speccompile.quantized.reading import open_checkpoint
from support.errors import raises
from support.quantized_gguf import write_gguf
from support.tiny import tiny_llama

#: A file such as Q4_K_M mixes types; transformers reads all of these.
MIXED = {
    "token_embd.weight": Kind.Q6_K,
    "blk.0.attn_q.weight": Kind.Q4_K,
    "blk.0.attn_k.weight": Kind.Q5_K,
    "blk.0.attn_v.weight": Kind.Q6_K,
    "blk.0.attn_output.weight": Kind.Q3_K,
    "blk.0.ffn_gate.weight": Kind.Q2_K,
    "blk.0.ffn_up.weight": Kind.Q8_0,
    "blk.0.ffn_down.weight": Kind.Q4_0,
    "blk.1.attn_q.weight": Kind.Q8_0,
    "blk.1.attn_k.weight": Kind.Q4_1,
    "blk.1.attn_v.weight": Kind.Q5_0,
    "blk.1.attn_output.weight": Kind.Q5_1,
    "blk.1.ffn_gate.weight": Kind.IQ4_NL,
    "blk.1.ffn_up.weight": Kind.IQ4_XS,
    "blk.1.ffn_down.weight": Kind.F32,
}


def small_model(tie: bool = True) -> LlamaForCausalLM:
    return tiny_llama(hidden=256, heads=4, kv_heads=2, vocab=64, tie=tie)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "mixed.gguf"
    write_gguf(small_model(), path, MIXED.__getitem__)
    return path


@pytest.fixture(scope="module")
def of_transformers(mixed: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(mixed.parent, gguf_file=mixed.name, dtype=torch.float32)


def test_weights_have_the_bits_that_transformers_loads(mixed: Path, of_transformers: PreTrainedModel) -> None:
    weights = quantized.read(mixed)
    assert len(weights) == len(MIXED) - 1
    expected = of_transformers.state_dict()
    for name, weight in weights.items():
        assert torch.equal(weight.dequantize().view(torch.int32), expected[name].view(torch.int32)), name


def test_the_other_tensors_are_those_that_transformers_loads(mixed: Path, of_transformers: PreTrainedModel) -> None:
    checkpoint = open_checkpoint(mixed)
    expected = of_transformers.state_dict()
    tied = {"lm_head.weight"}
    assert checkpoint.others.keys() == expected.keys() - checkpoint.weights.keys() - tied
    assert all(torch.equal(tensor, expected[name]) for name, tensor in checkpoint.others.items())


def test_rows_of_q_and_k_change_places_with_their_scales(tmp_path: Path) -> None:
    """llama.cpp interleaves the halves of each head. The weight of each row is a number that names it."""
    model = small_model()
    with torch.no_grad():
        for path in ("q_proj", "k_proj"):
            weight = model.model.layers[0].self_attn.get_submodule(path).weight
            weight.copy_(torch.arange(1.0, len(weight) + 1)[:, None].expand_as(weight))
    write_gguf(model, tmp_path / "rows.gguf", lambda _: Kind.Q8_0)
    weights = quantized.read(tmp_path / "rows.gguf")
    for path, rows in (("q_proj", 256), ("k_proj", 128)):
        first = weights[f"model.layers.0.self_attn.{path}.weight"].dequantize()[:, 0]
        assert torch.allclose(first, torch.arange(1.0, rows + 1), rtol=1e-3)


def test_the_format_lists_the_types_by_number_of_weights(mixed: Path) -> None:
    weights = quantized.read(mixed)
    assert weights.format.startswith("GGUF Q6_K, Q8_0, ")
    assert weights["model.layers.0.self_attn.q_proj.weight"].group == 32
    assert weights["model.layers.0.self_attn.v_proj.weight"].bits == 6


def test_each_lookup_reads_the_file(mixed: Path) -> None:
    weights = quantized.read(mixed)
    name = next(iter(weights))
    assert weights[name] is not weights[name]


# --- refused ----------------------------------------------------------------------------------------------------------


def test_a_type_without_scales_for_integers_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "ternary.gguf"

    def kind_of(name: str) -> Kind:
        return Kind.TQ2_0 if name == "blk.1.ffn_up.weight" else Kind.Q8_0

    write_gguf(small_model(), path, kind_of)
    with raises(UnsupportedCheckpoint, source=str(path)) as error:
        quantized.read(path)
    assert error.value.fields["reason"].startswith("blk.1.ffn_up.weight: it is of type TQ2_0, and only Q8_0")


def test_a_tensor_without_a_parameter_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "extra.gguf"
    write_gguf(small_model(), path, lambda _: Kind.Q8_0, {"blk.0.attn_extra.weight": np.zeros((4, 4), np.float32)})
    with raises(UnsupportedCheckpoint) as error:
        quantized.read(path)
    assert error.value.fields["reason"].startswith("blk.0.attn_extra.weight: transformers has no parameter")


def test_tables_of_the_rotary_embedding_are_left_to_transformers(tmp_path: Path) -> None:
    path = tmp_path / "rope.gguf"
    write_gguf(small_model(), path, lambda _: Kind.Q8_0, {"rope_freqs.weight": np.ones(32, np.float32)})
    assert len(quantized.read(path)) == len(MIXED)


def test_a_file_without_quantised_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "float.gguf"
    write_gguf(small_model(), path, lambda _: Kind.F32)
    with raises(UnsupportedCheckpoint, reason="none of its weights is quantised"):
        quantized.read(path)


@settings(max_examples=25, deadline=None)
@given(share=st.floats(0, 0.999))
def test_a_file_that_is_cut_off_is_damaged(mixed: Path, share: float) -> None:
    data = mixed.read_bytes()
    path = mixed.with_name("cut.gguf")
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(DamagedCheckpoint):
        quantized.read(path)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_scale_that_is_not_finite_is_damage(tmp_path: Path) -> None:
    model = small_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = float("inf")
    path = tmp_path / "infinite.gguf"
    write_gguf(model, path, lambda _: Kind.Q8_0)
    with pytest.raises(DamagedCheckpoint):
        quantized.read(path)["model.layers.0.mlp.up_proj.weight"]


def test_a_file_that_does_not_exist() -> None:
    with pytest.raises(PretrainedError):
        quantized.read("nowhere.gguf")
