"""Folders of GPTQ, AWQ, compressed-tensors and torchao: read by the method that their config names, or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from speccompile import quantized
from speccompile.errors import DamagedCheckpoint, PretrainedError, UnsupportedCheckpoint
from support.errors import raises
from support.quantized_folders import LAYOUTS, Tensors, draw, gptq, write_folder
from support.tiny import tiny_llama

METHODS = tuple(LAYOUTS)
FIRST = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("method", METHODS)
def test_each_linear_is_read_by_its_parameters_name(method: str, tmp_path: Path) -> None:
    model = write_folder(tiny_llama(), tmp_path, method)
    weights = quantized.read(tmp_path)
    assert len(weights) == 14
    for name, weight in weights.items():
        assert torch.equal(weight.dequantize(), model.get_parameter(name))


def test_act_order_and_the_second_layout_of_gptq(tmp_path: Path) -> None:
    model = write_folder(tiny_llama(), tmp_path, "gptq", {"desc_act": True}, act_order=True)
    weight = quantized.read(tmp_path)[f"{FIRST}.weight"]
    assert weight.order is not None
    assert torch.equal(weight.dequantize(), model.get_parameter(f"{FIRST}.weight"))


def test_modules_may_have_their_own_bits(tmp_path: Path) -> None:
    """GPTQModel's ``dynamic``: the inputs of a module are known from ``g_idx``."""
    other = draw(torch.randn(64, 64), seed=5, bits=8, group=16)

    def change(tensors: Tensors) -> None:
        tensors |= {f"{FIRST}.{name}": tensor for name, tensor in gptq(other).items()}

    write_folder(tiny_llama(), tmp_path, "gptq", change=change)
    weight = quantized.read(tmp_path)[f"{FIRST}.weight"]
    assert (weight.bits, weight.group) == (8, 16)
    assert torch.equal(weight.dequantize(), other.weight)


def test_tensors_may_be_in_several_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_folder(tiny_llama(), tmp_path, "awq")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = {name: f"part{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for part in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    weights = quantized.read(tmp_path)
    assert weights[f"{FIRST}.weight"].shape == (64, 64)
    (tmp_path / "part0.safetensors").unlink()
    with raises(DamagedCheckpoint, reason=re.compile("part0.safetensors")):
        quantized.read(tmp_path)


# --- refused ----------------------------------------------------------------------------------------------------------


def refused(folder: Path, quantization: dict[str, Any]) -> str:
    """The reason for a folder with this config."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))
    if not (folder / "model.safetensors").is_file():
        write_folder(tiny_llama(), folder, "gptq", quantization)
    with raises(UnsupportedCheckpoint, source=str(folder)) as error:
        quantized.read(folder)
    reason: str = error.value.fields["reason"]
    return reason


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("fp8", "floating point of 8 bits"),
        ("fbgemm_fp8", "floating point of 8 bits"),
        ("nvfp4", "floating point of 4 bits"),
        ("bitsandbytes", "entries of a table"),
        ("hqq", "zero points are floating-point numbers"),
        ("auto-round", "AutoRound"),
        ("something-new", "an unknown format"),
    ],
)
def test_methods_without_a_reader_are_refused_by_name(method: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    with raises(UnsupportedCheckpoint, reason=re.compile(f"{method!r}.*{reason}")):
        quantized.read(tmp_path)


@pytest.mark.parametrize(
    ("method", "config", "reason"),
    [
        ("gptq", {"checkpoint_format": "marlin"}, "its GPTQ layout is 'marlin'"),
        ("gptq", {"pack_dtype": "int64"}, "packed into int64"),
        ("awq", {"version": "gemv"}, "its AWQ layout is 'gemv'"),
        ("awq", {"bits": 8}, "have 8 bits"),
        ("compressed-tensors", {"format": "float-quantized"}, "float-quantized"),
        ("compressed-tensors", {"format": "mxfp6-pack-quantized"}, "mxfp6-pack-quantized"),
        ("compressed-tensors", {"kv_cache_scheme": {"num_bits": 8}}, "KV cache"),
        ("compressed-tensors", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ("compressed-tensors", {"transform_config": {"config_groups": {"R1": {}}}}, "transform"),
        ("compressed-tensors", {"config_groups": {"a": {"weights": {"type": "float"}}}}, "type float"),
        ("compressed-tensors", {"config_groups": {"a": {"weights": {"strategy": "block"}}}}, "blocks"),
        (
            "compressed-tensors",
            {"config_groups": {"a": {"input_activations": {"dynamic": False}}}},
            "rounds its inputs",
        ),
        ("compressed-tensors", {"config_groups": {"a": {"output_activations": {"num_bits": 8}}}}, "rounds its outputs"),
    ],
)
def test_variants_that_are_not_exact_are_refused(
    method: str, config: dict[str, Any], reason: str, folders: dict[str, Path]
) -> None:
    assert reason in refused(folders[method], {**LAYOUTS[method].config, **config})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each method, whose configs tests overwrite."""
    made = {method: tmp_path_factory.mktemp(method) for method in METHODS}
    for method, folder in made.items():
        write_folder(tiny_llama(), folder, method)
    return made


def test_inputs_that_are_rounded_as_they_come_are_accepted(tmp_path: Path) -> None:
    """Steps round inputs in a way of their own; the weights are exact."""
    groups = LAYOUTS["compressed-tensors"].config["config_groups"]
    config = {"config_groups": {"group_0": {**groups["group_0"], "input_activations": {"dynamic": True}}}}
    write_folder(tiny_llama(), tmp_path, "compressed-tensors", config)
    assert quantized.read(tmp_path)[f"{FIRST}.weight"].bits == 4


@pytest.mark.parametrize(
    ("kind", "reason"), [("Float8Tensor", "Float8Tensor: floating point"), ("Int4TilePackedTo4dTensor", "tiles")]
)
def test_kinds_of_torchao_that_are_not_plain_integers_are_refused(kind: str, reason: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    facts = {"linear.weight": json.dumps({"_type": kind, "_data": {}}), "tensor_names": json.dumps(["linear.weight"])}
    save_file({"linear._weight_qdata": torch.zeros(4, 4)}, tmp_path / "model.safetensors", facts)
    assert reason in refused(tmp_path, {"quant_method": "torchao"})


def test_a_zero_point_that_libraries_read_in_different_ways_is_refused(tmp_path: Path) -> None:
    """Version 1 of GPTQ's layout stores a zero point of 0 as the largest number: it is less one."""

    def change(tensors: Tensors) -> None:
        tensors[f"{FIRST}.qzeros"] = torch.full_like(tensors[f"{FIRST}.qzeros"], -1)

    write_folder(tiny_llama(), tmp_path, "gptq", change=change)
    with raises(UnsupportedCheckpoint, reason=re.compile(f"^{FIRST}: a zero point is stored as 15")):
        quantized.read(tmp_path)[f"{FIRST}.weight"]


# --- damaged ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_file_that_is_cut_off_is_damaged(method: str, tmp_path: Path) -> None:
    write_folder(tiny_llama(), tmp_path, method)
    file = tmp_path / "model.safetensors"
    for size in (0, 4, 200, file.stat().st_size - 1):
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(DamagedCheckpoint):
            quantized.read(tmp_path)


@pytest.mark.parametrize(
    ("method", "tensor"),
    [
        *(("gptq", name) for name in ("qweight", "qzeros", "scales", "g_idx")),
        *(("awq", name) for name in ("qweight", "qzeros", "scales")),
        *(("compressed-tensors", f"weight_{name}") for name in ("packed", "scale", "zero_point", "shape")),
        *(("torchao", f"_weight_{name}") for name in ("qdata", "scale", "zero_point")),
    ],
)
def test_a_tensor_of_another_size_or_a_missing_one_is_an_error(method: str, tensor: str, tmp_path: Path) -> None:
    def halve(tensors: Tensors) -> None:
        tensors[f"{FIRST}.{tensor}"] = tensors[f"{FIRST}.{tensor}"][:-1]

    def remove(tensors: Tensors) -> None:
        del tensors[f"{FIRST}.{tensor}"]

    for change in (halve, remove):
        folder = tmp_path / change.__name__
        write_folder(tiny_llama(), folder, method, change=change)
        if change is remove and tensor == "g_idx":
            # Then groups are of successive inputs.
            assert quantized.read(folder)[f"{FIRST}.weight"].shape == (64, 64)
            continue
        with pytest.raises((DamagedCheckpoint, UnsupportedCheckpoint)):
            quantized.read(folder)[f"{FIRST}.weight"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"quantization_config": 3}'])
def test_a_config_that_cannot_be_read_is_damaged(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with raises(DamagedCheckpoint):
        quantized.read(tmp_path)


def test_a_folder_that_is_not_quantised_names_what_loads_it(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    with raises(UnsupportedCheckpoint, advice="Load it with speccompile.pretrained.load"):
        quantized.read(tmp_path)


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "is a pickle" in refused_without_tensors(tmp_path)


def refused_without_tensors(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    with raises(UnsupportedCheckpoint) as error:
        quantized.read(folder)
    reason: str = error.value.fields["reason"]
    return reason


def test_a_folder_that_does_not_exist() -> None:
    with raises(PretrainedError, reason="no such folder"):
        quantized.read("nowhere")
