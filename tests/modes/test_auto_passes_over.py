"""``mode="auto"`` passes over what it chose itself and cannot build, and says why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from speccompile import Speculator, wrap
from speccompile.errors import CaptureMismatch, HeadKeys
from speccompile.heads import MtpHead
from speccompile.modes.mtp.network import MtpNetwork
from speccompile.modes.ngram import NGram
from speccompile.tools.families.tiny import Family, tiny_model
from support.auto_choices import CHECKPOINTS, checkpoint, choose
from support.errors import raises
from support.families import model_of
from support.plans import auto_plan
from support.published_mtp import keys_of, write
from support.tiny import greedy, random_prompt, tiny_llama

SMALL: dict[str, Any] = {"tiers": (0, 1), "max_len": 32, "backend": "eager", "policy": "fixed:1"}


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


def why(spec: Speculator) -> str:
    return next(line for line in spec.explain().splitlines() if line.startswith("auto"))


def with_module(model: LlamaForCausalLM, folder: Path) -> MtpHead:
    """An MTP module in the model's checkpoint."""
    head = MtpHead.random(model, 1)
    write(folder, model, keys_of(head, "deepseek", model.config.num_hidden_layers))
    model.config.name_or_path = str(folder)
    return head


def refused(*_: Any, **__: Any) -> float:
    raise CaptureMismatch(model="MtpHead", difference=1.0, allowed=0.1, where="of the draft head")


def test_modules_that_cannot_be_loaded_are_passed_over(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """The names are those of a module; the tensors are of other shapes, and most are missing."""
    model.config.name_or_path = checkpoint(tmp_path, CHECKPOINTS["deepseek"][0], index=False)
    with wrap(model, "auto", **SMALL) as spec:
        assert type(spec.mode) is NGram
        assert "mtp cannot draft with the MTP module of the model's checkpoint (the draft head" in why(spec)
        assert "missing: layers.0.enorm.weight [64]" in why(spec)
    # Asked for by name, they are an error.
    with raises(HeadKeys, problems=re.compile(r"missing: layers\.0\.enorm\.weight")):
        wrap(model, "mtp", **SMALL)


def test_a_damaged_checkpoint_is_passed_over(model: LlamaForCausalLM, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    model.config.name_or_path = str(tmp_path)
    assert "model.safetensors is damaged" in choose(model, native=False).reason


def test_modules_that_cannot_be_built_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(layers=1)
    head = with_module(model, tmp_path)
    monkeypatch.setattr(MtpNetwork, "check", refused)
    with wrap(model, "auto", **SMALL) as spec:
        assert type(spec.mode) is NGram and "(the captured graph does not compute what MtpHead computes" in why(spec)
        prompt = random_prompt(9)
        ids = torch.tensor([prompt])
        assert spec.generate(ids, torch.ones_like(ids), max_new_tokens=8)[0, 9:].tolist() == greedy(model, prompt, 8)
    with pytest.raises(CaptureMismatch):
        wrap(model, "auto", draft=head, **SMALL)


#: By case: the family, where its checkpoint has the module, and why that is passed over; None if the module drafts.
FAMILIES: dict[str, tuple[str, str, str | None]] = {
    "after the target's layers": ("hy_v3", "model.layers.2.", None),
    "with a norm of the last layer's own": (
        "mimo_v2_flash",
        "model.mtp.layers.0.",
        "not known: layers.0.block.eh_p",
    ),
    "of layers without a norm in front": ("exaone4", "mtp.layers.0.", "has no attribute 'input_layernorm'"),
}


def with_own_layer(model: PreTrainedModel, folder: Path, layers: str, place: str, last_norm: str) -> None:
    """A module at ``place`` in the model's checkpoint, whose layer is the last one of ``layers``."""
    config = model.config.get_text_config()
    model.save_pretrained(folder / "plain")
    last = f"{layers}{config.num_hidden_layers - 1}."
    with safe_open(folder / "plain" / "model.safetensors", "pt") as file:
        block = {key.removeprefix(last): file.get_tensor(key) for key in file.keys() if key.startswith(last)}  # noqa: SIM118
    size = config.hidden_size
    parts = {"enorm": (size,), "hnorm": (size,), "eh_proj": (size, 2 * size), last_norm: (size,)}
    extra = {f"{key}.weight": torch.ones(shape) / size for key, shape in parts.items()}
    write(folder, model, {f"{place}{key}": value for key, value in (block | extra).items()})
    model.config.name_or_path = str(folder)


def assert_passed_over(model: PreTrainedModel, reason: str) -> None:
    """Before anything is captured; test_modules_that_cannot_be_loaded_are_passed_over has a wrap of such modules."""
    config = auto_plan(model, **SMALL).config
    assert type(config.mode) is NGram and config.choice is not None and reason in config.choice.reason


def assert_drafts_or_passed_over(model: PreTrainedModel, reason: str | None) -> None:
    """``reason``: why the module is passed over, or None if it drafts."""
    if reason is not None:
        assert_passed_over(model, reason)
        return
    with wrap(model, "auto", **SMALL) as spec:
        assert type(spec.mode) is not NGram and "the model's checkpoint has an MTP module" in why(spec)
        prompt = random_prompt(9, vocab=100)
        assert spec.generate(torch.tensor([prompt]), max_new_tokens=8)[0, 9:].tolist() == greedy(model, prompt, 8)


@pytest.mark.parametrize("case", FAMILIES)
def test_modules_of_a_family_draft_or_are_passed_over(case: str, tmp_path: Path) -> None:
    name, place, reason = FAMILIES[case]
    model = model_of(name)
    last_norm = "shared_head.norm" if reason is None else "final_layernorm"
    with_own_layer(model, tmp_path, "model.layers.", place, last_norm)
    assert_drafts_or_passed_over(model, reason)


ROTARY: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
DENSE: dict[str, Any] = {
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "dense"],
}
MODULE: dict[str, Any] = {
    "num_nextn_predict_layers": 1,
    "mtp_layer_types": ["sliding_attention"],
    "mtp_mlp_layer_types": ["dense"],
}
#: By case: the family, options of the tiny text model, what its config holds of modules, where the file has the
#: layers, and why the module is passed over; None if it drafts.
WITH_IMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, str | None]] = {
    "layers in a language model": (
        "glm4v_moe",
        {"rope_parameters": ROTARY | {"partial_rotary_factor": 0.5}},
        {},
        "model.language_model.layers.",
        None,
    ),
    "a window": ("step3p7", DENSE, MODULE, "model.layers.", None),
    "no layer type of the module": ("step3p7", DENSE, {}, "model.layers.", "without `mtp_layer_types` is ambiguous"),
}


@pytest.mark.parametrize("case", WITH_IMAGES)
def test_modules_of_a_vision_language_model_draft_or_are_passed_over(case: str, tmp_path: Path) -> None:
    name, options, module, layers, reason = WITH_IMAGES[case]
    config_class = CONFIG_MAPPING[name]
    model = tiny_model(Family(name, config_class, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]), **options)
    for field, value in module.items():
        setattr(model.config.text_config, field, value)
    with_own_layer(model, tmp_path, layers, f"{layers}2.", "shared_head.norm")
    assert_drafts_or_passed_over(model, reason)


def test_a_module_of_a_layer_type_that_the_target_lacks_is_passed_over(tmp_path: Path) -> None:
    """The target's rotary table has no frequencies for it; transformers' own ``use_mtp`` fails alike."""
    model = model_of("mellum", layer_types=["full_attention", "full_attention"])
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types, model.config.mtp_mlp_layer_types = ["sliding_attention"], ["sparse"]
    write(tmp_path, model, keys_of(MtpHead.random(model), "qwen", 2))
    model = type(model).from_pretrained(tmp_path).eval()
    with pytest.raises(KeyError, match="sliding_attention"):
        model.generate(torch.tensor([random_prompt(9, vocab=100)]), max_new_tokens=4, do_sample=False, use_mtp=True)
    with wrap(model, "auto", **SMALL) as spec:
        assert type(spec.mode) is NGram and "a module does not run: KeyError: 'sliding_attention'" in why(spec)
