"""``quantize``, and a wrap of what it wrote: the same bits as the weights that were rounded in memory."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import speccompile
from speccompile import Adapters, pretrained, quantize
from speccompile.errors import (
    CannotSaveWeights,
    HostMemoryFull,
    InvalidOption,
    OriginalsFreed,
    UnsupportedCheckpoint,
    UnsupportedModel,
)
from speccompile.heads import Eagle3Head, save_eagle3
from speccompile.modes.auto import Auto
from speccompile.ops.cpu.quantized import QuantizedPacks
from speccompile.quantized.packed_folder import PackedFolder
from speccompile.speculator.speculator import Speculator
from speccompile.utils import host_memory
from support.errors import raises
from support.families import family
from support.packed_models import MODELS, PROMPTS, greedy, wrapped
from support.quantized import TEXTS, dequantize_, quantized, random_tiers
from support.tiny import tiny_llama

LENGTH = 20


#: Each with a form of weights. Those of experts are transposed, in half precision; and all of a layer in one matrix.
FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "tied": (MODELS["tied"], "int8"),
    "gpt2": (MODELS["gpt2"], "int4"),
    "gpt_oss": (lambda: family("gpt_oss", dtype=torch.bfloat16), "int4"),
    "dbrx": (lambda: family("dbrx"), "int8"),
}


@pytest.fixture(autouse=True)
def over_the_ops(native: None) -> None:
    """See :func:`native`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ``tiny_llama()`` in int4."""
    folder = tmp_path_factory.mktemp("quantized") / "tiny"
    quantize(tiny_llama(), folder)
    return folder


@pytest.fixture
def mapped(folder: Path) -> Iterator[Speculator]:
    with plain(pretrained.load_model(str(folder))) as spec:
        yield spec


def plain(model: PreTrainedModel, **options: Any) -> Speculator:
    """A wrap with one executable, which is built fast."""
    return wrapped(model, **{"tiers": (0,), "max_batch": 1} | options)


def text(spec: Any, **options: Any) -> torch.Tensor:
    result: torch.Tensor = spec.generate(PROMPTS[:1], max_new_tokens=LENGTH, **options)
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_has_the_bits_of_weights_in_memory(family: str, tmp_path: Path) -> None:
    make, weights = FAMILIES[family]
    make().save_pretrained(tmp_path / "model")
    model = pretrained.load_model(str(tmp_path / "model"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantize(model, tmp_path / "folder", weights=weights)  # type: ignore[arg-type]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    loaded = pretrained.load_model(str(tmp_path / "folder"), verify=True)
    assert (type(loaded), loaded.dtype, loaded.training) == (type(model), model.dtype, False)
    with pytest.raises(OriginalsFreed, match=re.escape("spec(input_ids)")):
        greedy(loaded)
    with plain(model, weights=weights) as own, plain(loaded) as mapped:
        assert torch.equal(own(PROMPTS).logits, mapped(PROMPTS).logits)
        assert torch.equal(text(own), text(mapped))


def test_rows_in_any_tier_and_drawn_texts(folder: Path) -> None:
    with wrapped(tiny_llama(), weights="int4") as own, wrapped(pretrained.load_model(str(folder))) as mapped:
        assert random_tiers(own, LENGTH, seed=1) == random_tiers(mapped, LENGTH, seed=1)
        drawn = [text(spec, do_sample=True, temperature=0.8, top_k=20, seed=3) for spec in (own, mapped)]
        assert torch.equal(*drawn) and not torch.equal(drawn[0], text(own))
        assert mapped.check(TEXTS[:2], max_new_tokens=LENGTH, eos_token_id=[])


@pytest.mark.parametrize("kind", ["Q4_K", "GPTQ"])
def test_integers_of_a_checkpoint_are_kept(kind: str, tmp_path: Path) -> None:
    model = tiny_llama(hidden=128)
    weights = quantized(model, kind)
    floats = dequantize_(copy.deepcopy(model), weights)
    quantize(model, tmp_path / "folder", weights=weights)
    loaded = pretrained.load_model(str(tmp_path / "folder"))
    state = loaded.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in floats.state_dict().items())
    with plain(loaded) as mapped:
        assert f"of packed {kind} in" in mapped.explain()
        assert mapped.check(TEXTS[:2], max_new_tokens=LENGTH, eos_token_id=[])


def test_a_calibration_rounds_the_folder(tmp_path: Path) -> None:
    model = tiny_llama()
    calibration = speccompile.calibrate(model, [PROMPTS[0]], tokens=24)
    quantize(model, tmp_path / "folder", calibration=calibration)
    with (
        plain(model, weights="int4", calibration=calibration) as own,
        plain(pretrained.load_model(str(tmp_path / "folder"))) as mapped,
        plain(model, weights="int4") as nearest,
    ):
        logits = [spec(PROMPTS).logits for spec in (own, mapped, nearest)]
    assert torch.equal(*logits[:2]) and not torch.equal(*logits[1:])


@pytest.mark.parametrize("free_originals", [False, True])
def test_a_wrap_writes_the_same_folder(folder: Path, tmp_path: Path, free_originals: bool) -> None:
    with plain(tiny_llama(), weights="int4", free_originals=free_originals) as spec:
        spec.save_weights(tmp_path / "folder")
    written, wanted = PackedFolder(tmp_path / "folder").manifest, PackedFolder(folder).manifest
    assert written == wanted


def test_weights_that_are_not_rounded_are_written_though_they_are_freed(tmp_path: Path) -> None:
    forms: Any = {"*": "int4", "lm_head": "same"}
    with plain(tiny_llama(), weights=forms, free_originals=True) as spec:
        spec.save_weights(tmp_path / "folder")
        own = text(spec)
    with plain(pretrained.load_model(str(tmp_path / "folder"))) as mapped:
        assert torch.equal(text(mapped), own)


def test_a_mapped_model_is_written_again(mapped: Speculator, folder: Path, tmp_path: Path) -> None:
    mapped.save_weights(tmp_path / "folder")
    written, wanted = PackedFolder(tmp_path / "folder").manifest, PackedFolder(folder).manifest
    assert written.weights == wanted.weights
    # The configurations name different folders.
    assert [file for file in written.files.values() if file.tensors] == [
        file for file in wanted.files.values() if file.tensors
    ]


def test_the_model_is_refused_where_its_own_values_are_needed(folder: Path, tmp_path: Path) -> None:
    model = pretrained.load_model(str(folder))
    with pytest.raises(OriginalsFreed, match=re.escape("spec(input_ids)")):
        greedy(model)
    with pytest.raises(OriginalsFreed):
        speccompile.calibrate(model, [PROMPTS[0]], tokens=24)
    for weights in ("int4", {"lm_head": "int8"}):
        with raises(InvalidOption, name="weights", reason=re.compile("packed already")):
            plain(model, weights=weights)
    with raises(InvalidOption, name="model", reason=re.compile("packed already")):
        quantize(model, tmp_path / "again")
    # A refusal leaves the model as it was.
    with plain(model) as spec:
        assert text(spec).shape == (1, PROMPTS.shape[1] + LENGTH)


def test_weights_are_the_pages_of_the_file(folder: Path) -> None:
    model = pretrained.load_model(str(folder))
    pack = model.get_parameter("model.layers.0.mlp.up_proj.weight").pack  # type: ignore[attr-defined]
    with plain(model) as spec:
        packs = dict(spec._build.packs.items())  # type: ignore[union-attr]
        address = packs["model.layers.0.mlp.up_proj.weight"].tensors[0].data_ptr()
    assert address == pack.tensors[0].data_ptr()
    mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (file,) = [
        line[5] for line in mappings if int(line[0].split("-")[0], 16) <= address < int(line[0].split("-")[1], 16)
    ]
    assert file == str(folder / "packed-00001.safetensors")


def test_adapters_and_heads_are_beside_the_pages(folder: Path) -> None:
    head = Eagle3Head.random(tiny_llama(), taps=(0, 1, 1))
    options: dict[str, Any] = {"mode": "eagle3_one_model", "draft": head, "tiers": (0, 3), "max_len": 60}
    options |= {"backend": "eager", "adapters": Adapters(count=1)}
    with (
        speccompile.wrap(pretrained.load_model(str(folder)), **options) as mapped,
        plain(tiny_llama(), weights="int4") as own,
    ):
        assert torch.equal(text(mapped), text(own))


def test_the_head_of_a_folder_is_what_auto_drafts_with(tmp_path: Path) -> None:
    model = tiny_llama()
    save_eagle3(Eagle3Head.random(model, taps=(0, 1, 1)), tmp_path / "head")
    quantize(model, tmp_path / "folder", head=tmp_path / "head")
    loaded = pretrained.load_model(str(tmp_path / "folder"))
    choice = Auto().choose(loaded, ["suffix"], draft_len=3, slots=1, native=True)
    assert (choice.name, choice.reason) == ("eagle3_one_model", "the model's folder has a draft head")
    with (
        wrapped(tiny_llama(), weights="int4") as own,
        speccompile.wrap(loaded, "auto", tiers=(0, 3), max_batch=2, max_len=60, backend="eager") as mapped,
    ):
        assert "eagle3_one_model" in mapped.explain()
        assert torch.equal(text(own), text(mapped))


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [({"dtype": torch.float16}, "dtype"), ({"ranks": 2}, "ranks"), ({"device": "cuda"}, "device")],
)
def test_options_that_a_folder_cannot_have(folder: Path, options: Any, name: str) -> None:
    with raises(InvalidOption, name=name):
        pretrained.load_model(str(folder), **options)


def test_a_folder_needs_its_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: (1000, 1 << 30))
    with pytest.raises(HostMemoryFull, match=r"MiB are needed, and 0\.0 MiB of its 1\.0 GiB are free"):
        pretrained.load_model(str(folder))


def test_only_a_packed_folder_is_verified() -> None:
    with raises(InvalidOption, name="verify"):
        pretrained.load_model("smollm2", verify=True)


def test_what_transformers_does_not_load_alike_is_not_written(tmp_path: Path) -> None:
    cut = tiny_llama()
    cut.model.layers = cut.model.layers[:1]
    with pytest.raises(UnsupportedCheckpoint, match=r"lacks .* Write the folder again"):
        quantize(cut, tmp_path / "folder")
    with pytest.raises(CannotSaveWeights, match=r"inv_freq differs .* dtype="):
        quantize(tiny_llama().to(torch.bfloat16), tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_a_head_is_checked_before_weights_are_packed(tmp_path: Path) -> None:
    for head in (tmp_path / "none", tmp_path):
        with raises(InvalidOption, name="head"):
            quantize(tiny_llama(), tmp_path / "folder", head=head)
    save_eagle3(Eagle3Head.random(tiny_llama(), taps=(0, 1, 1)), tmp_path / "head")
    with raises(InvalidOption, name="head", reason=re.compile("would be in it")):
        quantize(tiny_llama(), tmp_path / "head" / "folder", head=tmp_path / "head")


def test_auto_reads_no_other_folder_than_the_models(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "speccompile.json").write_text("{}")
    choice = Auto().choose(tiny_llama(), ["suffix"], draft_len=3, slots=1, native=True)
    assert choice.name == "suffix"


def test_hooks_of_the_state_dict_do_not_grow_and_other_forms_are_kept(folder: Path) -> None:
    model = tiny_llama(hidden=128)
    weights = quantized(model, "Q8_0", only=lambda path: "mlp" in path, others="int4")
    with plain(model, weights=weights) as first:
        wanted = text(first)
    for _ in range(2):
        with plain(model) as again:
            assert torch.equal(text(again), wanted)
    assert len(model.model.layers[0].mlp.up_proj._state_dict_hooks) == 1


def test_a_plan_beside_another_wrap_does_not_undo_its_packs(folder: Path) -> None:
    """Parameters are plain while another thread wraps, and rebuild() plans meanwhile."""
    model = pretrained.load_model(str(folder))
    one, other = QuantizedPacks.of_model(model), QuantizedPacks.of_model(model)
    one.prepare(model)
    other.prepare(model)
    one.seal()
    other.undo()
    with plain(model) as spec:
        assert text(spec).shape == (1, PROMPTS.shape[1] + LENGTH)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    model = tiny_llama()
    with pytest.raises(UnsupportedModel, match="not a transformers PreTrainedModel"):
        quantize("tiny", tmp_path / "folder")  # type: ignore[arg-type]
    with raises(InvalidOption, name="weights", value="same"):
        quantize(model, tmp_path / "folder", weights="same")
    with plain(model) as spec, pytest.raises(CannotSaveWeights, match="none of them is rounded"):
        spec.save_weights(tmp_path / "folder")
    (tmp_path / "file").write_text("")
    with raises(InvalidOption, name="folder"):
        quantize(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_weights_that_a_checkpoint_has_apart_stay_apart(tmp_path: Path) -> None:
    """Though the configuration ties them: transformers leaves them apart where they differ."""
    model = tiny_llama()
    model.config.tie_word_embeddings = True
    quantize(model, tmp_path / "folder")
    with plain(model, weights="int4") as own, plain(pretrained.load_model(str(tmp_path / "folder"))) as mapped:
        assert torch.equal(own(PROMPTS).logits, mapped(PROMPTS).logits)
