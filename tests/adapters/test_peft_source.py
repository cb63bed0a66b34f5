"""Adapters that cannot be had exactly: one clear error each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from speccompile import Adapters
from speccompile.adapters.buffers import AdapterBuffers, LoraPair
from speccompile.adapters.peft_source import read_adapter
from speccompile.errors import InvalidAdapter
from speccompile.graph_capture.model_info import inspect_model
from support.errors import raises
from support.lora import lora_config, with_adapters
from support.tiny import tiny_llama

MODEL = tiny_llama()
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def read(source: Any, **options: Any) -> dict[str, LoraPair]:
    buffers = AdapterBuffers.of(MODEL, inspect_model(MODEL), Adapters(1, **options))
    return read_adapter("legal", source, buffers, MODEL)


def model_with(**options: Any) -> PeftModel:
    return with_adapters({"default": lora_config(**options)})


def folder_with(tmp_path: Path, **options: Any) -> Path:
    model_with(**options).save_pretrained(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "use_dora=True is not supported: DoRA"),
        ({"bias": "lora_only"}, "bias='lora_only' is not supported: the adapter has biases"),
        ({"lora_bias": True}, "lora_bias=True is not supported: the adapter has biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.'lm_head'. is not supported"),
        (
            {"trainable_token_indices": [1, 2]},
            "trainable_token_indices=.* is not supported: the adapter replaces embeddings",
        ),
        ({"layer_replication": [(0, 2), (0, 2)]}, "layer_replication=.* is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported: it belongs to other base"),
        ({"targets": ("embed_tokens",)}, "tensor .*lora_embedding_A.* is not a LoRA matrix"),
        ({"targets": ("lm_head",)}, "tensor .*lm_head.* is not a LoRA matrix"),
        ({"rank": 17}, r"its rank in .* is 17; wrap with Adapters\(max_rank=17\)"),
        ({"rank_pattern": {"v_proj": 40}}, r"its rank in .*v_proj is 40"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_plain_lora_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    with raises(InvalidAdapter, name="legal", source="a PeftModelForCausalLM", reason=re.compile(reason)):
        read(model_with(**options))


def test_another_kind_of_adapter_is_refused_by_name(tmp_path: Path) -> None:
    config = IA3Config(task_type="CAUSAL_LM", target_modules=["v_proj"], feedforward_modules=[])
    model = get_peft_model(tiny_llama(), config)
    model.save_pretrained(str(tmp_path))
    for source in (model, tmp_path):
        with raises(InvalidAdapter, reason=re.compile("its type must be LORA, got IA3")):
            read(source)


def test_fields_that_are_empty_ask_for_nothing(tmp_path: Path) -> None:
    """PEFT writes ``"target_parameters": []`` into adapters for models with experts."""
    folder = folder_with(tmp_path)
    plain = read(folder)
    empty = {"target_parameters": [], "modules_to_save": [], "trainable_token_indices": {}, "layer_replication": []}
    configured(**empty)(folder)
    assert read(folder).keys() == plain.keys()
    configured(alora_invocation_tokens=[])(folder)
    with raises(InvalidAdapter, reason=re.compile(r"alora_invocation_tokens=\[\] is not supported")):
        read(folder)


def damage(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return apply


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def forget(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def configured(**fields: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | fields))

    return apply


LAYER = "base_model.model.model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (cut, "peft cannot read it"),
        (lambda folder: (folder / CONFIG).write_text("{"), "peft cannot read it"),
        (configured(peft_type="NEWEST"), "peft cannot read it"),
        (lambda folder: (folder / CONFIG).write_text("{}"), "its type must be LORA, got None"),
        (configured(r=8), r"its rank in .* must be 8, as in its config, got 4"),
        (configured(rank_pattern={"up_proj": 2}), r"its rank in .*up_proj must be 2, as in its config, got 4"),
        (configured(lora_alpha=None), "of its config is not valid"),
        (configured(lora_alpha=float("nan")), "its scale in .* is nan"),
        (configured(alpha_pattern={"up_proj": "large"}), "of its config is not valid"),
        (configured(rank_pattern={"(": 4}), "of its config is not valid"),
        (configured(rank_pattern=[4]), "of its config is not valid"),
        (forget(WEIGHTS), "the folder has no adapter_model.safetensors"),
        (
            damage(lambda tensors: tensors.update({f"{LAYER}.lora_A.weight": torch.ones(4, 64, dtype=torch.int8)})),
            r"1.mlp.up_proj.lora_A.weight must be floating point, got torch.int8",
        ),
        (
            damage(lambda tensors: tensors.pop(f"{LAYER}.lora_B.weight")),
            r"lora_A and lora_B for .*1.mlp.up_proj, got only lora_A",
        ),
        (damage(lambda tensors: tensors.clear()), "it adapts nothing"),
        (
            damage(lambda tensors: tensors.update({f"{LAYER}.lora_A.weight": torch.zeros(4, 63)})),
            r"must be \[r, 64\] and \[128, r\], got \[4, 63\] and \[128, 4\]",
        ),
        (
            damage(lambda tensors: tensors.update({f"{LAYER}.lora_A.weight": torch.full((4, 64), torch.nan)})),
            "hold numbers that are not finite",
        ),
        (
            damage(lambda tensors: tensors.update({f"{LAYER}.magnitude": torch.zeros(4)})),
            r"its tensor .*magnitude is not a LoRA matrix",
        ),
        (
            damage(
                lambda tensors: tensors.update(
                    {f"base_model.model.model.layers.9.q.lora_{kind}.weight": torch.zeros(4, 4) for kind in "AB"}
                )
            ),
            "adapts model.layers.9.q, which the model does not have",
        ),
    ],
)
def test_a_damaged_folder_is_one_error(change: Callable[[Path], object], reason: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    change(folder)
    with raises(InvalidAdapter, name="legal", source=str(folder), reason=re.compile(reason)):
        read(folder)


def test_what_the_dtype_of_the_buffers_does_not_hold_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    damage(lambda tensors: tensors[f"{LAYER}.lora_A.weight"].fill_(1e5))(folder)
    assert read(folder)
    with raises(InvalidAdapter, reason=re.compile("1.mlp.up_proj hold numbers that are not finite in torch.float16")):
        read(folder, dtype="float16")


def test_linears_without_buffers_are_named() -> None:
    with raises(InvalidAdapter, reason=re.compile(r"Adapters\(modules=\(\.\.\., 'down_proj'\)\)")):
        read(model_with(targets=("down_proj",)), modules=("q_proj", "v_proj"))


def test_what_is_no_source_is_refused() -> None:
    with raises(InvalidAdapter, source="a LlamaForCausalLM", reason=re.compile("^give a folder")):
        read(MODEL)
    model = with_adapters({"one": lora_config(), "two": lora_config()})
    model.base_model.set_adapter(["one", "two"])
    with raises(InvalidAdapter, reason=re.compile("it has 2 active adapters")):
        read(model)


def test_a_model_and_its_folder_are_the_same_adapter(tmp_path: Path) -> None:
    model = model_with(rank=6, use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.*v_proj": 7})
    model.save_pretrained(str(tmp_path))
    one, other = read(model), read(tmp_path)
    assert one.keys() == other.keys() and len(one) == 14
    for path, pair in one.items():
        module = model.get_submodule(f"base_model.model.{path}")
        assert torch.equal(pair.a, other[path].a) and torch.equal(pair.b, other[path].b)
        assert pair.scale == other[path].scale == module.scaling["default"]
    assert len({pair.scale for pair in one.values()}) == 3


def test_a_scale_that_was_set_in_the_model_counts() -> None:
    model = model_with()
    module = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    module.set_scale("default", 3.0)
    assert read(model)["model.layers.0.self_attn.q_proj"].scale == module.scaling["default"] == 6.0


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("nobody/nothing", r"not in the cache of huggingface_hub, and the hub cannot be reached \(OSError: no network"),
        ("./nowhere/at/all", "no such folder exists"),
    ],
)
def test_a_repository_that_cannot_be_reached_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    def no_network(url: str) -> None:
        raise OSError("no network")

    monkeypatch.setattr("speccompile.utils.hub.get_hf_file_metadata", no_network)
    monkeypatch.setattr(PeftConfig, "from_pretrained", lambda *_: pytest.fail("peft tries for half a minute"))
    with raises(InvalidAdapter, source=source, reason=re.compile(reason)):
        read(source)
