"""Embeddings of images by the model's own code, and what is refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import speccompile
from speccompile import Speculator
from speccompile.errors import PlaceholderToken, UnusableInputs
from speccompile.graph_capture.model_info import inspect_model
from speccompile.multimodal.encoder import FeatureEncoder
from speccompile.multimodal.features import PromptFeatures
from speccompile.multimodal.image_keys import image_places
from speccompile.multimodal.model_inputs import ModelInputs
from speccompile.multimodal.recorded_forward import RecordedForward
from speccompile.ops.cpu.free_originals import originals_freed
from support.errors import raises
from support.our_kernels import our_kernels
from support.tiny import tiny_llama
from support.vision_models import FAMILIES, IMAGE, REFUSED, VIDEO, VisionFamily

SIZES: dict[str, Any] = {"tiers": (0,), "max_batch": 2, "max_len": 64, "backend": "eager"}


@pytest.fixture(scope="module")
def llava() -> PreTrainedModel:
    return FAMILIES["Llava"].model()


@pytest.fixture(scope="module")
def spec(llava: PreTrainedModel) -> Iterator[Speculator]:
    with speccompile.wrap(llava, "none", **SIZES) as spec:
        yield spec


def encoder_of(model: PreTrainedModel) -> FeatureEncoder:
    inputs = ModelInputs.of(model, inspect_model(model))
    assert inputs is not None
    return FeatureEncoder(model, inputs)


def encoded(family: VisionFamily, model: PreTrainedModel, batch: dict[str, Any]) -> list[PromptFeatures | None]:
    given = {name: value for name, value in batch.items() if name not in ("input_ids", "attention_mask")}
    return encoder_of(model).encode(batch["input_ids"], batch["attention_mask"].bool(), given)


@pytest.mark.parametrize("name", ["Llava", "Qwen3VL"])
def test_features_are_those_of_the_row_alone(name: str) -> None:
    family = FAMILIES[name]
    model = family.model()
    batch = family.batch(model, (0, 1))
    nothing, both = encoded(family, model, batch)
    kept = batch["attention_mask"][1].bool()
    per_token = {key: value for key, value in batch.items() if key.endswith(("ids", "mask"))}
    alone = batch | {key: value[1:, kept] for key, value in per_token.items()}
    (row,) = encoded(family, model, alone)
    assert nothing is None and both is not None and row is not None
    torch.testing.assert_close(both.embeddings, row.embeddings)
    torch.testing.assert_close(both.layers, row.layers)
    assert both.layers.shape == ((2 if name == "Qwen3VL" else 0), len(row.places), 64)
    assert both.places.tolist() == [at for at, token in enumerate(alone["input_ids"][0].tolist()) if token == IMAGE]
    assert (both.offsets is None) == (row.offsets is None) == (not family.parts)
    if both.offsets is not None and row.offsets is not None:
        assert torch.equal(both.offsets, row.offsets) and both.delta == row.delta < 0


def test_the_forward_ends_before_the_first_layer_and_leaves_no_hook(llava: PreTrainedModel) -> None:
    calls: list[object] = []
    layer: Any = llava.model.language_model.layers[0]
    handle = layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    try:
        family = FAMILIES["Llava"]
        encoded(family, llava, family.batch(llava, (1,)))
    finally:
        handle.remove()
    assert not calls and not layer._forward_pre_hooks


def test_equal_images_have_equal_identities_and_others_do_not(llava: PreTrainedModel) -> None:
    family = FAMILIES["Llava"]
    batch = family.batch(llava, (1,))
    prompt = batch["input_ids"][0].tolist()
    other = batch | {"pixel_values": batch["pixel_values"] + 1}
    found = [encoded(family, llava, each)[0] for each in (batch, batch, other)]
    first, second, third = (each.identities(prompt) for each in found if each is not None)
    assert first == second != third
    places = [at for at, token in enumerate(prompt) if token == IMAGE]
    assert all(number < 0 for at in places for number in (first[at], third[at]))
    assert all(first[at] == prompt[at] for at in range(len(prompt)) if at not in places)


@pytest.mark.parametrize(("start", "width"), [(0, 4), (2, 4), (3, 2), (5, 8), (9, 4)])
def test_a_chunk_has_its_part(start: int, width: int) -> None:
    places = torch.tensor([2, 3, 4, 7])
    values = torch.arange(1.0, 5.0)[:, None].expand(4, 3)
    offsets = torch.arange(10).repeat(3, 1)
    features = PromptFeatures(places, values, values[None] * 10, offsets, delta=9)
    chunk = features.chunk(start, width)
    for at in range(width):
        place = start + at
        expected = places.tolist().index(place) + 1 if place in places.tolist() else 0
        assert bool(chunk.embedded[at]) == (expected > 0)
        assert chunk.embeddings[at].tolist() == [expected] * 3
        assert chunk.layers[0, at].tolist() == [expected * 10] * 3
        assert chunk.offsets is not None and chunk.offsets[:, at].tolist() == [place - 9 if place < 10 else 0] * 3


# --- what is refused -----------------------------------------------------------------------------


def test_images_without_placeholders(spec: Speculator) -> None:
    pixels = torch.zeros(1, 3, 8, 8)
    reason = re.compile("pixel_values is given, and no prompt has a token that stands for it")
    with raises(UnusableInputs, reason=reason):
        spec.generate(torch.tensor([[5, 6, 7]]), pixel_values=pixels)
    with raises(UnusableInputs, reason=reason):
        spec.engine.submit([5, 6, 7], inputs={"pixel_values": pixels})
    assert spec.engine.idle


def test_placeholders_without_images(spec: Speculator) -> None:
    for decode in (lambda: spec.generate(torch.tensor([[5, IMAGE, 7]])), lambda: spec.engine.submit([5, IMAGE])):
        with raises(PlaceholderToken, position=1, token=IMAGE):
            decode()


@pytest.mark.parametrize("images", [1, 3])
def test_a_count_that_differs(spec: Speculator, images: int) -> None:
    ids = torch.tensor([[5, *[IMAGE] * 8, 7]])
    with raises(UnusableInputs, reason=re.compile("refuses them: .*[Ii]mage features and image tokens do not match")):
        spec.generate(ids, pixel_values=torch.zeros(images, 3, 8, 8))


def test_inputs_of_a_wrong_shape_or_name(spec: Speculator) -> None:
    ids = [5, *[IMAGE] * 4, 7]
    with raises(UnusableInputs, reason=re.compile("the model's own code refuses them: ")):
        spec.engine.submit(ids, inputs={"pixel_values": torch.zeros(1, 5, 8, 8)})
    with raises(UnusableInputs, reason=re.compile("the model's forward has no input 'pixels'; it has image_sizes, ")):
        spec.engine.submit(ids, inputs={"pixels": torch.zeros(1, 3, 8, 8)})


def test_a_model_of_text_has_no_images() -> None:
    with (
        speccompile.wrap(tiny_llama(), "none", **SIZES) as spec,
        raises(UnusableInputs, reason=re.compile("LlamaForCausalLM is decoded as a model of text")),
    ):
        spec.engine.submit([5, 6], inputs={"pixel_values": torch.zeros(1, 3, 8, 8)})


def test_gemma_attends_in_both_directions_inside_an_image() -> None:
    family = REFUSED["Gemma3"]
    model = family.model()
    batch = family.batch(model, (1,))
    # As its processor returns it.
    batch["token_type_ids"] = batch["input_ids"].eq(IMAGE).long()
    with speccompile.wrap(model, "none", **SIZES) as spec:
        with raises(UnusableInputs, reason=re.compile("the model's tokens of an image attend to later ones")):
            spec.generate(**batch)
        text = {"input_ids": torch.tensor([[5, 6, 7]]), "token_type_ids": torch.zeros((1, 3), dtype=torch.int64)}
        expected = model.generate(**text, max_new_tokens=5, do_sample=False)
        assert torch.equal(spec.generate(**text, max_new_tokens=5), expected)


@pytest.mark.parametrize("name", ["Llava", "Qwen3VL"])
def test_the_text_models_own_weights_may_be_freed(name: str) -> None:
    family = FAMILIES[name]
    model = family.model()
    batch = family.batch(model, (1, 0))
    expected = model.generate(**batch, max_new_tokens=8, do_sample=False)
    with (
        our_kernels() as backend,
        speccompile.wrap(model, "none", **SIZES | {"backend": backend}, free_originals=True) as spec,
    ):
        assert originals_freed(model)
        assert torch.equal(spec.generate(**batch, max_new_tokens=8), expected)


def test_weights_of_the_vision_code_may_change(llava: PreTrainedModel) -> None:
    family = FAMILIES["Llava"]
    batch = family.batch(llava, (1,))
    encoder, given = encoder_of(llava), {"pixel_values": batch["pixel_values"]}

    def embeddings() -> torch.Tensor:
        (features,) = encoder.encode(batch["input_ids"], batch["attention_mask"].bool(), given)
        assert features is not None
        return features.embeddings

    before, module = embeddings(), llava.model.multi_modal_projector.linear_2
    weight = module.weight
    module.weight = nn.Parameter(weight * 2)
    changed = embeddings()
    module.weight = weight
    assert not torch.equal(before, changed) and torch.equal(before, embeddings())


def test_gemma_4_reads_more_than_embeddings() -> None:
    family = REFUSED["Gemma4"]
    model = family.model()
    with (
        speccompile.wrap(model, "none", **SIZES) as spec,
        raises(UnusableInputs, reason=re.compile("its text model also reads per_layer_inputs")),
    ):
        spec.generate(**family.batch(model, (1, 0)))


def test_explain_has_the_inputs(spec: Speculator) -> None:
    line = next(line for line in str(spec.explain()).splitlines() if line.startswith("images"))
    assert "embedded by the model's own code" in line and "pixel_values" in line


def test_each_kind_of_placeholder_needs_its_input() -> None:
    family = FAMILIES["Qwen2VL"]
    model = family.model()
    batch = family.batch(model, (1,))
    ids = torch.cat([batch["input_ids"], torch.tensor([[VIDEO, 5]])], dim=1)
    place = ids.shape[1] - 2
    kinds = torch.cat([batch["mm_token_type_ids"], torch.tensor([[0, 0]])], dim=1)
    given = {name: batch[name] for name in ("pixel_values", "image_grid_thw")} | {"mm_token_type_ids": kinds}
    with raises(UnusableInputs, reason=f"prompt token {place} stands for other input, which is missing"):
        encoder_of(model).encode(ids, torch.ones_like(ids, dtype=torch.bool), given)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda seen: seen.fill_(True), "attend to later ones"),
        (lambda seen: seen[5].index_fill_(0, torch.tensor([2]), False), "do not attend to all tokens between others"),
        (lambda seen: seen.triu_(-3), ""),
    ],
    ids=["both directions", "a hole", "a window"],
)
def test_masks_that_chunks_do_not_have(changed: Callable[[torch.Tensor], object], says: str) -> None:
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    changed(seen)
    kept = torch.tensor([False, *[True] * 8])
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    mask[0, 0, 1:, 1:] = seen
    inputs = ModelInputs(frozenset(), (), 4, torch.float32, torch.device("cpu"))
    for given in (mask, torch.where(mask, 0.0, -1e30)):
        recorded = RecordedForward(first=torch.zeros(1, 9, 4), mask=given)
        with raises(UnusableInputs, reason=re.compile(says)) if says else contextlib.nullcontext():
            recorded.check(0, kept, inputs)


def test_an_image_beside_another_has_the_identity_that_it_has_alone() -> None:
    """Also if it is embedded in a batch with it, by other kernels."""
    alone, runs = torch.tensor([[False, True, True, False]]), torch.tensor([[True, True, False, True, True]])
    pixels = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    (first,) = image_places({"pixel_values": pixels[:1]}, alone) or []
    (both,) = image_places({"pixel_values": pixels}, runs) or []
    assert both[:2] == first and {key for key, _ in both[2:]} != {first[0][0]}
    assert [place for _, place in both] == [0, 1, 0, 1]
    swapped, *_ = image_places({"pixel_values": pixels.flip(0)}, runs) or []
    assert swapped == both[2:] + both[:2]
    by_row = image_places({"pixel_values": pixels}, torch.tensor([[True, True, False], [False, True, True]]))
    assert by_row == [both[:2], both[2:]]


@pytest.mark.parametrize(
    ("inputs", "lengths"),
    [
        ({"pixel_values": torch.zeros(2, 3)}, [3]),
        ({"pixel_values": torch.zeros(2, 3)}, [2, 4]),
        ({"pixel_values": torch.zeros(2, 3), "image_sizes": torch.zeros(1, 2)}, [2, 2]),
        ({"pixel_values": torch.zeros(12, 3), "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4]])}, [4, 1]),
        ({"pixel_values": torch.zeros(11, 3), "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4]])}, [1, 2]),
        ({"pixel_values": [torch.zeros(3)]}, [3]),
    ],
)
def test_images_that_are_not_known(inputs: dict[str, Any], lengths: list[int]) -> None:
    """Two in one run of places, one in several, and inputs that are not by image."""
    row = [place for length in lengths for place in [True] * length + [False]]
    assert image_places(inputs, torch.tensor([row])) is None


def test_patches_belong_to_the_images_of_the_grid() -> None:
    grid, pixels = torch.tensor([[1, 2, 2], [1, 2, 4]]), torch.arange(12.0)[:, None]
    given = {"pixel_values": pixels, "image_grid_thw": grid}
    runs = torch.tensor([[True, False, True, True]])
    (found,) = image_places(given, runs) or []
    (changed,) = image_places(given | {"pixel_values": pixels + (pixels == 11)}, runs) or []
    assert found[0] == changed[0] and found[1:] != changed[1:]
