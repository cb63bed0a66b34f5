"""``wrap(weights="int4", calibration=...)``: another rounding, and nothing else differs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import speccompile
from speccompile import Calibration
from speccompile.errors import CannotSave, InvalidCalibration, InvalidOption, OriginalsFreed
from support.errors import raises
from support.families import model_of
from support.packed_models import MODELS, PROMPTS, wrapped
from support.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return speccompile.calibrate(tiny_llama(), PROMPTS)


@pytest.mark.parametrize("name", ["tied", "gpt2"])
def test_the_text_is_that_of_the_rounded_model(name: str) -> None:
    """A calibration chooses other numbers, for the ops that all texts with int4 weights are computed by."""
    model = MODELS[name]()
    with wrapped(model, weights="int4", calibration=speccompile.calibrate(model, PROMPTS)) as spec:
        assert "rounded to int4 in groups of 32, calibrated" in spec.explain()
        report = spec.check(list(PROMPTS), max_new_tokens=12)
        assert report or report.largest_logit_change < 0.05
        assert spec.check(list(PROMPTS), max_new_tokens=12, reference="plain")


def test_a_calibration_has_the_inputs_of_all_linears_of_a_recurrent_model() -> None:
    """Mamba multiplies its time steps by a weight that stands on the left."""
    model = model_of("mamba")
    texts = PROMPTS % 90 + 5
    with wrapped(model, weights="int4", calibration=speccompile.calibrate(model, texts)) as spec:
        assert "8 rounded to int4 in groups of 32, calibrated" in spec.explain()
        assert spec.check(list(texts), max_new_tokens=12, reference="plain")


def test_it_concerns_weights_in_int4_alone(calibration: Calibration) -> None:
    model = tiny_llama()
    weights = {"*": "int8", "mlp": "int4"}
    with wrapped(model, weights=weights) as spec:
        before = dict(spec._build.packs.items())
    with wrapped(model, weights=weights, calibration=calibration) as spec:
        for path, pack in spec._build.packs.items():
            same = all(map(torch.equal, pack.tensors, before[path].tensors))
            assert same == ("mlp" not in path)


def test_a_table_of_embeddings_has_no_inputs_and_is_rounded_to_the_nearest(calibration: Calibration) -> None:
    with wrapped(tiny_llama(), weights={"*": "int4", "embed_tokens": "int4"}, calibration=calibration) as spec:
        calibrated = {path for path, pack in spec._build.packs.items() if pack.importance is not None}
        assert calibrated == {path for path, _ in spec._build.packs.items() if ".layers." in path}
        assert spec.check(list(PROMPTS), max_new_tokens=12, reference="plain")


def test_logits_are_nearer_than_with_the_nearest_numbers() -> None:
    """Of a model whose inputs differ in size, as those of trained ones do."""
    model = tiny_llama()
    generator = torch.Generator().manual_seed(0)
    errors = []
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.copy_(torch.exp(1.5 * torch.randn(64, generator=generator)))
        own = model(PROMPTS).logits
        for given in (None, speccompile.calibrate(model, PROMPTS)):
            with wrapped(model, tiers=(0,), weights="int4", calibration=given) as spec:
                errors.append(float((spec(PROMPTS).logits - own).square().mean()))
    assert errors[1] < 0.8 * errors[0]


def test_a_model_that_has_no_weights_of_its_own_is_refused() -> None:
    model = tiny_llama()
    wrapped(model, tiers=(0,), max_batch=1, free_originals=True)
    with raises(OriginalsFreed):
        speccompile.calibrate(model, PROMPTS)


def test_weights_that_change_in_place_are_rounded_by_it_again(calibration: Calibration) -> None:
    model = tiny_llama()
    spec = wrapped(model, weights="int4", calibration=calibration)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-3)
    spec.generate(PROMPTS, max_new_tokens=4)
    packs = dict(spec._build.packs.items())
    pack = packs["model.layers.1.mlp.down_proj.weight"]
    wanted = pack.form.pack_for_inputs(pack.weight, calibration.importance["model.layers.1.mlp.down_proj.weight"])
    assert all(map(torch.equal, pack.tensors, wanted))


def test_texts_and_states_of_the_model_are_told_apart(calibration: Calibration) -> None:
    model = tiny_llama()
    found = set()
    other = speccompile.calibrate(model, PROMPTS[:1])
    for given in (None, calibration, other):
        with wrapped(model, tiers=(0,), weights="int4", calibration=given) as spec:
            found.add(spec.target_id)
    assert len(found) == 3


def test_a_file_holds_all_of_it(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.safetensors"
    calibration.save(path)
    again = Calibration.load(path)
    assert (again.digest, again.target, again.tokens) == (calibration.digest, calibration.target, calibration.tokens)
    # Of the same values in another dtype.
    with wrapped(tiny_llama(), tiers=(0,), weights="int4", calibration=path) as spec:
        text = spec.generate(PROMPTS, max_new_tokens=8)
    with wrapped(tiny_llama(), tiers=(0,), weights="int4", calibration=calibration) as spec:
        assert torch.equal(spec.generate(PROMPTS, max_new_tokens=8), text)


def damage(path: Path, how: str, calibration: Calibration) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "cut off":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        path.write_bytes(data[:-3] + bytes([data[-3] ^ 64]) + data[-2:])
    elif how == "something else":
        save_file({"weight": torch.ones(3)}, path)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("missing", "the file does not exist"),
        ("cut off", "cannot be read"),
        ("flipped", "SHA-256 differs"),
        ("something else", "its format is None"),
    ],
)
def test_a_damaged_file_is_refused(how: str, says: str, calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration"
    calibration.save(path)
    damage(path, how, calibration)
    with raises(InvalidCalibration, source=str(path), reason=re.compile(says)):
        wrapped(tiny_llama(), weights="int4", calibration=str(path))


def test_a_calibration_of_another_model_is_refused(calibration: Calibration) -> None:
    with raises(InvalidCalibration, reason=re.compile("it belongs to LlamaForCausalLM v2:")):
        wrapped(tiny_llama(seed=1), weights="int4", calibration=calibration)


def test_a_calibration_that_lacks_a_weight_is_refused(calibration: Calibration) -> None:
    part = {name: values for name, values in calibration.importance.items() if "up_proj" not in name}
    partial = Calibration(calibration.target, calibration.tokens, part)
    reason = "no inputs of model.layers.0.mlp.up_proj.weight and of 1 others"
    with raises(InvalidCalibration, reason=re.compile(reason)):
        wrapped(tiny_llama(), weights="int4", calibration=partial)
    # It needs none of what has another form.
    wrapped(tiny_llama(), tiers=(0,), weights={"down_proj": "int4"}, calibration=partial)


@pytest.mark.parametrize(
    ("weights", "given", "says"),
    [("int8", None, "no weight has a form"), ("same", None, "no weight has a form"), ("int4", 3, "give what")],
)
def test_options_that_are_not_compatible(weights: str, given: Any, says: str, calibration: Calibration) -> None:
    with raises(InvalidOption, name="calibration", reason=re.compile(says)):
        wrapped(tiny_llama(), weights=weights, calibration=calibration if given is None else given)


def test_a_package_names_its_file(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration"
    calibration.save(path)
    model = tiny_llama()
    with wrapped(model, weights="int4", calibration=path) as spec:
        spec.save(tmp_path / "package")
        wanted = spec.generate(PROMPTS, max_new_tokens=12)
    with speccompile.load(tmp_path / "package", model) as again:
        assert torch.equal(again.generate(PROMPTS, max_new_tokens=12), wanted)
    with wrapped(model, weights="int4", calibration=calibration) as spec, raises(CannotSave, name="calibration"):
        spec.save(tmp_path / "other")
