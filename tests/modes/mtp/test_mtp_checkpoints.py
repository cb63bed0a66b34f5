"""MTP modules from checkpoints: every layout loads, and every key that is not as it should be is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from speccompile.errors import HeadKeys, InvalidHead
from speccompile.heads import MtpHead, load_mtp, save_mtp
from speccompile.modes.mtp.variants import DEEPSEEK, ERNIE, MIMO, QWEN, MtpVariant
from support.errors import raises
from support.families import model_of
from support.published_mtp import keys_of, write

#: Target, layout, how many modules, and the family's variant. MiMo's own code is not among transformers' models; its
#: layers are Qwen2's.
FAMILIES: list[tuple[str, str, int, MtpVariant]] = [
    ("deepseek_v3", "deepseek", 2, DEEPSEEK),
    ("glm4_moe", "deepseek", 3, DEEPSEEK),
    ("qwen3_next", "qwen", 1, QWEN),
    ("qwen3_5_text", "qwen", 1, QWEN),
    ("qwen3_5_moe_text", "qwen", 1, QWEN),
    ("qwen2", "mimo", 1, MIMO),
    ("ernie4_5_moe", "ernie", 1, ERNIE),
]


def head_of(model: PreTrainedModel, modules: int = 1, variant: MtpVariant | None = None) -> MtpHead:
    return MtpHead.random(model, modules, variant=variant)


def assert_same(loaded: MtpHead, head: MtpHead) -> None:
    wanted = head.state_dict()
    assert loaded.variant == head.variant
    assert loaded.state_dict().keys() == wanted.keys()
    for key, value in loaded.state_dict().items():
        assert value.dtype == wanted[key].dtype
        torch.testing.assert_close(value, wanted[key], rtol=0, atol=0, msg=key)


@pytest.mark.parametrize(("name", "layout", "modules", "variant"), FAMILIES, ids=[case[0] for case in FAMILIES])
def test_every_layout_loads(tmp_path: Path, name: str, layout: str, modules: int, variant: MtpVariant) -> None:
    model = model_of(name)
    head = head_of(model, modules, variant)
    layers = len(model.get_decoder().layers)
    write(tmp_path, model, keys_of(head, layout, layers))
    loaded = load_mtp(tmp_path, model)
    assert_same(loaded, head)
    # The layer of such a module attends fully, whatever the target's do; the target may be none that can be captured.
    assert len(loaded.observed.kv) == modules
    assert loaded.lm_head is model.get_output_embeddings()


@pytest.mark.parametrize(("name", "layout", "modules", "variant"), FAMILIES, ids=[case[0] for case in FAMILIES])
def test_what_is_saved_has_the_family_s_keys(
    tmp_path: Path, name: str, layout: str, modules: int, variant: MtpVariant
) -> None:
    model = model_of(name)
    head = head_of(model, modules, variant)
    save_mtp(head, model, tmp_path, dtype=torch.float32)
    written, wanted = load_file(tmp_path / "model.safetensors"), keys_of(head, layout, len(model.get_decoder().layers))
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[key], value.float()) for key, value in wanted.items())
    assert_same(load_mtp(tmp_path, model), head)


def test_modules_that_the_layout_has_no_names_for_are_not_saved(tmp_path: Path) -> None:
    model = model_of("qwen3_next")
    with raises(InvalidHead, source="of MTP modules", reason=re.compile("has one module, got 2")):
        save_mtp(head_of(model, 2), model, tmp_path)


@pytest.fixture(scope="module")
def keys(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return keys_of(head_of(model, 2), "deepseek", 2)


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    return folder


def test_from_the_target_s_own_folder(tmp_path: Path, model: PreTrainedModel, keys: dict[str, torch.Tensor]) -> None:
    """What the target has too is the target's; transformers itself reads past the modules."""
    shared = {
        "model.layers.2.embed_tokens.weight": model.get_input_embeddings().weight,
        "model.layers.3.shared_head.head.weight": model.get_output_embeddings().weight,
    }
    write(tmp_path, model, keys | shared)
    target = type(model).from_pretrained(tmp_path).eval()
    loaded = load_mtp(None, target)
    assert len(loaded.layers) == 2
    assert loaded.embed_tokens is target.get_input_embeddings()
    weight = keys["model.layers.3.self_attn.q_proj.weight"]
    assert torch.equal(loaded.layers[1].block.self_attn.q_proj.weight, weight)


def test_in_8_bits(tmp_path: Path, model: PreTrainedModel, keys: dict[str, torch.Tensor]) -> None:
    """As DeepSeek-V3 is published: a factor for each block of 128, the last ones cut off."""
    name = "model.layers.2.mlp.down_proj.weight"
    weight = torch.randn(keys[name].shape).clamp(-3, 3)
    rows, columns = weight.shape[0], weight.shape[1]
    scales = 1 + torch.rand(-(-rows // 128), -(-columns // 128))
    rounded = weight.to(torch.float8_e4m3fn)
    loaded = load_mtp(saved(tmp_path, keys | {name: rounded, f"{name}_scale_inv": scales}), model)
    wide = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    assert torch.equal(loaded.layers[0].block.mlp.down_proj.weight, rounded.float() * wide)


@pytest.mark.parametrize("scales", [torch.tensor(0.5), torch.rand(64, 1) + 0.5], ids=["of a tensor", "of outputs"])
def test_in_8_bits_with_scales_of_other_forms(
    tmp_path: Path, model: PreTrainedModel, keys: dict[str, torch.Tensor], scales: torch.Tensor
) -> None:
    """As ModelOpt and compressed-tensors publish it, with scales of inputs, which are left out."""
    module = "model.layers.2.mlp.down_proj"
    values = keys[f"{module}.weight"].to(torch.float8_e4m3fn)
    added = {f"{module}.weight": values, f"{module}.weight_scale": scales, f"{module}.input_scale": torch.tensor(0.1)}
    loaded = load_mtp(saved(tmp_path, keys | added), model)
    assert torch.equal(loaded.layers[0].block.mlp.down_proj.weight, values.float() * scales)


def test_8_bits_without_scales_are_named(tmp_path: Path, model: PreTrainedModel, keys: dict[str, torch.Tensor]) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    folder = saved(tmp_path, keys | {name: keys[name].to(torch.float8_e4m3fn)})
    with raises(HeadKeys, problems=re.compile("float8 with 0 tensors of scales: layers.0.block.mlp.down_proj.weight")):
        load_mtp(folder, model)


#: What is wrong: keys to drop, keys to add, and what the error says.
BROKEN: dict[str, tuple[list[str], dict[str, tuple[int, ...]], str]] = {
    "a key is missing": (["model.layers.3.enorm.weight"], {}, "missing: layers.1.enorm.weight"),
    "a layer's key is missing": (["model.layers.2.self_attn.o_proj.weight"], {}, "missing: layers.0.block.self_attn"),
    "a key of the block is not known": ([], {"model.layers.2.mlp.extra.weight": (3,)}, "not known: .*mlp.extra.weight"),
    "another shape": ([], {"model.layers.2.eh_proj.weight": (64, 64)}, r"eh_proj.weight is \[64, 64\] and must be"),
    "factors of no weight": ([], {"model.layers.2.mlp.no.weight_scale_inv": (1, 1)}, "no.weight_scale_inv"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_key_is_used_or_named(
    tmp_path: Path, model: PreTrainedModel, keys: dict[str, torch.Tensor], name: str
) -> None:
    dropped, added, problem = BROKEN[name]
    tensors = {key: value for key, value in keys.items() if key not in dropped}
    tensors |= {key: torch.zeros(shape) for key, shape in added.items()}
    with raises(HeadKeys, problems=re.compile(problem)):
        load_mtp(saved(tmp_path, tensors), model)


def test_a_layout_s_unknown_key_is_named(tmp_path: Path, model: PreTrainedModel) -> None:
    tensors = keys_of(head_of(model), "qwen", 2) | {"mtp.layers.1.mlp.up_proj.weight": torch.zeros(3)}
    with raises(HeadKeys, problems=re.compile(r"not known: mtp\.layers\.1\.mlp\.up_proj\.weight \[3\]")):
        load_mtp(saved(tmp_path, tensors), model)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"model.safetensors": {"model.layers.0.enorm.weight": torch.zeros(3)}}, "no MTP modules after 2 layers"),
        ({}, r"no \*.safetensors"),
        ({"model.safetensors": b"no such file"}, "cannot be read"),
    ],
    ids=["the target's layers alone", "no files", "a damaged file"],
)
def test_no_modules(tmp_path: Path, model: PreTrainedModel, files: dict[str, Any], reason: str) -> None:
    for name, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            save_file(content, tmp_path / name)
    with raises(InvalidHead, reason=re.compile(reason)):
        load_mtp(tmp_path, model)


def test_a_target_without_what_modules_share() -> None:
    with raises(InvalidHead, reason=re.compile("no module 'norm' to share")):
        MtpHead.random(model_of("gpt2"))
