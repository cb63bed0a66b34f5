"""Checkpoints of compressed-tensors whose modules belong to different groups of the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speccompile import quantized
from speccompile.errors import DamagedCheckpoint
from speccompile.quantized import GroupedWeight
from support.errors import raises
from support.quantized_folders import GROUP, Tensors, draw, pack_quantized, write_folder
from support.tiny import tiny_llama

Q, K = (f"model.layers.0.self_attn.{name}_proj" for name in "qk")
#: Three orders of precedence: a name, a regular expression, a class.
TARGETS = {"name": [Q], "regular expression": ["re:.*q_proj"], "class": ["Linear"]}


def scheme(symmetric: bool, bits: int = 4) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}


def groups(first: list[str], second: list[str], symmetric: bool) -> dict[str, Any]:
    """``symmetric`` is that of the first group, and not of the second."""
    schemes = {"a": (first, scheme(symmetric)), "b": (second, scheme(not symmetric))}
    return {
        "config_groups": {
            name: {"targets": targets, "weights": weights} for name, (targets, weights) in schemes.items()
        }
    }


def write(folder: Path, config: dict[str, Any]) -> quantized.QuantizedWeights:
    """Without the zero point of one module."""

    def change(tensors: Tensors) -> None:
        del tensors[f"{Q}.weight_zero_point"]

    write_folder(tiny_llama(), folder, "compressed-tensors", config, change=change)
    return quantized.read(folder)


@pytest.mark.parametrize("stands_second", [False, True])
@pytest.mark.parametrize(
    ("more", "less"), [("name", "class"), ("regular expression", "class"), ("name", "regular expression")]
)
def test_a_module_belongs_to_the_group_that_names_it_most_exactly(
    more: str, less: str, stands_second: bool, tmp_path: Path
) -> None:
    def config(symmetric: bool) -> dict[str, Any]:
        targets = (TARGETS[more], TARGETS[less])
        return groups(*(targets[::-1] if stands_second else targets), symmetric=symmetric is not stands_second)

    weight = write(tmp_path / "symmetric", config(symmetric=True))[f"{Q}.weight"]
    assert isinstance(weight, GroupedWeight) and weight.minimums is None
    checkpoint = write(tmp_path / "not symmetric", config(symmetric=False))
    with raises(DamagedCheckpoint):
        checkpoint[f"{Q}.weight"]


def test_bits_are_those_of_the_modules_own_group(tmp_path: Path) -> None:
    """64 inputs fill 8 words with 4 bits each, and 16 with 8."""
    config = {
        "config_groups": {
            "a": {"targets": ["re:.*q_proj"], "weights": scheme(False, 4)},
            "b": {"targets": ["re:.*k_proj"], "weights": scheme(False, 8)},
        }
    }
    write_folder(tiny_llama(), tmp_path, "compressed-tensors", config)
    checkpoint = quantized.read(tmp_path)
    assert checkpoint[f"{Q}.weight"].bits == 4
    with raises(DamagedCheckpoint):
        checkpoint[f"{K}.weight"]


@pytest.mark.parametrize("stands_second", [False, True])
def test_of_regular_expressions_the_first_in_the_alphabet_counts(stands_second: bool, tmp_path: Path) -> None:
    targets = (["re:.*self_attn.*"], ["re:.*q_proj"])
    config = groups(*(targets[::-1] if stands_second else targets), symmetric=not stands_second)
    checkpoint = write(tmp_path, config)
    with raises(DamagedCheckpoint):
        checkpoint[f"{Q}.weight"]


def test_of_groups_with_one_target_the_last_counts(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, groups(["Linear"], ["Linear"], symmetric=True))
    with raises(DamagedCheckpoint):
        checkpoint[f"{Q}.weight"]


def test_an_embedding_has_a_group_of_its_own(tmp_path: Path) -> None:
    """Classes are not in the file: the bits are those that fill the words."""
    integers = draw(torch.ones(128, 64), 0, bits=8)

    def change(tensors: Tensors) -> None:
        del tensors["model.embed_tokens.weight"]
        tensors |= {f"model.embed_tokens.{name}": tensor for name, tensor in pack_quantized(integers).items()}

    config = groups(["Linear"], ["Embedding"], symmetric=False)
    config["config_groups"]["b"]["weights"] = scheme(False, 8)
    write_folder(tiny_llama(), tmp_path, "compressed-tensors", config, change=change)
    weight = quantized.read(tmp_path)["model.embed_tokens.weight"]
    assert weight.bits == 8 and torch.equal(weight.dequantize(), integers.weight)


def test_a_packed_weight_may_have_one_scale_and_one_zero_point(tmp_path: Path) -> None:
    """Of the strategy "tensor", whose zero point is not packed."""
    integers = draw(torch.ones(64, 64), 1)

    def change(tensors: Tensors) -> None:
        tensors[f"{Q}.weight_packed"] = pack_quantized(integers)["weight_packed"]
        tensors[f"{Q}.weight_scale"] = torch.tensor([0.25])
        tensors[f"{Q}.weight_zero_point"] = torch.tensor([3], dtype=torch.int8)

    write_folder(tiny_llama(), tmp_path, "compressed-tensors", change=change)
    weight = quantized.read(tmp_path)[f"{Q}.weight"]
    assert torch.equal(weight.dequantize(), (integers.values - 8 - 3).float() * 0.25)


@pytest.mark.parametrize("targets", ["Linear", [3], ["re:("], {"a": 1}])
def test_targets_that_cannot_be_read_are_damaged(targets: Any, tmp_path: Path) -> None:
    config = {"config_groups": {"a": {"targets": targets, "weights": scheme(False)}}}
    write_folder(tiny_llama(), tmp_path, "compressed-tensors", config)
    with raises(DamagedCheckpoint):
        quantized.read(tmp_path)
