"""Packed folders on the disk: their contents, and what a damaged one says before anything is built."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from speccompile.errors import DamagedCheckpoint, InvalidOption, UnsupportedCheckpoint
from speccompile.ops.cpu.forms import FORMS
from speccompile.quantized import packed_manifest, packed_writer
from speccompile.quantized.packed_folder import PackedFolder
from speccompile.quantized.packed_manifest import MANIFEST, is_packed, packed_head
from speccompile.quantized.packed_weight import PackedWeight
from speccompile.quantized.packed_writer import ALIGNMENT, tensor_bytes, write_packed
from support.errors import raises
from support.tiny import tiny_llama

UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"


def weight(order: torch.Tensor | None = None) -> PackedWeight:
    numbers = torch.randint(0, 256, (4, 16, 16, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return PackedWeight("int4", (numbers, torch.ones(4, 2, 32, dtype=torch.float16)), (128, 64), order)


def write(folder: Path, **tensors: torch.Tensor) -> Path:
    others = {NORM: torch.arange(64.0), **tensors}
    weights = {UP: weight(torch.arange(64).flip(0))}
    write_packed(folder, tiny_llama(), weights, others, format="packed weights", check=lambda written: None)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("packed") / "folder")


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "copy")
    return tmp_path / "copy"


def test_what_was_written_is_read(written: Path) -> None:
    packed = PackedFolder(written)
    assert list(packed.weights) == [UP] and packed.weights.format == "packed weights"
    read, wanted = packed.weights[UP], weight()
    assert (read.form, read.shape) == ("int4", (128, 64))
    assert all(torch.equal(one, other) for one, other in zip(read.tensors, wanted.tensors, strict=True))
    assert read.order is not None and torch.equal(read.order, torch.arange(64).flip(0))
    assert dict(packed.others).keys() == {NORM} and torch.equal(packed.others[NORM], torch.arange(64.0))
    assert packed.verify() == 4
    assert is_packed(written) and packed_head(written) is None and packed_head(written.parent) is None


def test_the_folder_has_nothing_of_an_unfinished_one(written: Path) -> None:
    assert [path.name for path in written.parent.iterdir()] == ["folder"]


@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=6), limit=st.integers(1, 2000))
@settings(max_examples=20, deadline=None)
def test_weights_lie_at_multiples_of_a_cache_line(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("sizes") / "folder"
    tensors = {f"t{index}": torch.full((size,), index, dtype=torch.bfloat16) for index, size in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_writer, "FILE_BYTES", limit)
        write(folder, **tensors)
    packed = PackedFolder(folder)
    assert all(torch.equal(packed.others[name], tensor) for name, tensor in tensors.items())
    assert packed.verify() == 4 + len(sizes)
    # The library reads them, too, and a weight begins at the start of a line.
    for path in folder.glob("*.safetensors"):
        header = int.from_bytes(path.read_bytes()[:8], "little")
        assert (8 + header) % ALIGNMENT == 0
        with safe_open(path, "pt") as file:
            assert set(file.keys())
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in packed.weights[UP].tensors)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path, index: int) -> None:
    data = bytearray(path.read_bytes())
    data[index] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: cut(folder / "packed-00001.safetensors"), "packed-00001.safetensors has .* bytes, and was"),
        (lambda folder: (folder / "packed-00001.safetensors").unlink(), "it has no file packed-00001.safetensors"),
        (lambda folder: flip(folder / "packed-00001.safetensors", 20), "the header of packed-00001.safetensors was"),
        (lambda folder: flip(folder / "config.json", 20), "config.json was changed"),
        (lambda folder: flip(folder / MANIFEST, 40), "speccompile.json (was changed|cannot be read)"),
        (lambda folder: cut(folder / MANIFEST), "speccompile.json cannot be read"),
    ],
    ids=["cut", "missing", "header", "config", "manifest", "manifest cut"],
)
def test_a_damaged_folder_is_refused_at_once(folder: Path, change: Callable[[Path], object], says: str) -> None:
    change(folder)
    with pytest.raises(DamagedCheckpoint, match=says):
        PackedFolder(folder)


def test_a_changed_byte_of_a_tensor_is_found_by_verify(folder: Path) -> None:
    flip(folder / "packed-00001.safetensors", -1)
    packed = PackedFolder(folder)
    with pytest.raises(DamagedCheckpoint, match="SHA-256"):
        packed.verify()


def test_another_layout_is_refused(folder: Path) -> None:
    fields = json.loads((folder / MANIFEST).read_text())
    del fields["sha256"]
    fields["version"] = 7
    (folder / MANIFEST).write_text(json.dumps({**fields, "sha256": packed_manifest._digest(fields)}))
    with pytest.raises(UnsupportedCheckpoint, match=r"layout 7.* reads layout 2.*speccompile quantize"):
        PackedFolder(folder)


def test_a_folder_with_files_is_not_overwritten(written: Path, tmp_path: Path) -> None:
    with raises(InvalidOption, name="folder", value=str(written)):
        write(written)
    with raises(InvalidOption, name="folder", value=str(tmp_path / "no" / "such")):
        write(tmp_path / "no" / "such")
    (tmp_path / "empty").mkdir()
    assert PackedFolder(write(tmp_path / "empty")).verify() == 4


def test_the_bytes_of_packs_are_those_of_this_version(tmp_path: Path) -> None:
    """Folders that exist are decoded by these layouts: another layout is another VERSION."""
    values = (torch.arange(64 * 128) % 29 - 14.0).reshape(64, 128) / 7
    digests = {
        form: hashlib.sha256(b"".join(map(tensor_bytes, FORMS[form].pack(values)))).hexdigest()[:16]
        for form in ("int8", "int4", "fp4")
    }
    assert (packed_manifest.VERSION, digests) == (
        2,
        {"int8": "d981797df7218be1", "int4": "0bb8a77cf7a835b0", "fp4": "ec5dfb5eb57f1528"},
    )


@pytest.mark.parametrize("kind", ["link", "mount"])
def test_a_place_that_cannot_be_renamed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "empty")
    with raises(InvalidOption, name="folder"):
        write(tmp_path / ("link" if kind == "link" else "empty"))


def test_settings_that_generation_does_not_use_are_kept(tmp_path: Path) -> None:
    """Published checkpoints have a temperature without do_sample; save_pretrained refuses it."""
    model = tiny_llama()
    model.generation_config.temperature, model.generation_config.do_sample = 0.6, False
    weights = {UP: weight()}
    write_packed(tmp_path / "folder", model, weights, {}, format="packed weights", check=lambda written: None)
    assert json.loads((tmp_path / "folder" / "generation_config.json").read_text())["temperature"] == 0.6


def test_a_failure_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_writer, "_write_tensor", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "folder")
    assert not list(tmp_path.iterdir())
