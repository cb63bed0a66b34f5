"""Records exported as the files that SpecForge's offline training reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from speccompile import wrap
from speccompile.errors import InvalidInput, InvalidOption
from speccompile.hidden_states import Record, SavedHiddenStates, SaveHiddenStates, export_specforge
from support.errors import raises
from support.tiny import tiny_llama

#: The keys of each strategy's files, from the ``OfflineCaptureLayout`` of SpecForge's providers.
KEYS = {
    "eagle3": {"aux_hidden_state", "hidden_state"},
    "dflash": {"hidden_states"},
    "domino": {"hidden_states"},
    "dspark": {"hidden_states", "target_last_hidden_states"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three texts of a bfloat16 model, two of them in one file."""
    folder = tmp_path_factory.mktemp("records")
    saves = SaveHiddenStates(folder, write_interval=2, eagle3_layers_to_capture=[0, 1, 2])
    model = tiny_llama(layers=3, dtype=torch.bfloat16)
    with wrap(model, tiers=(0,), max_batch=1, max_len=40, backend="eager", save_hidden_states=saves) as spec:
        texts, masks = [[5, 6, 7, 8], [*range(9, 30)], [3, 1]], [[0, 0, 1, 1], [0] * 10 + [1] * 11, [0, 1]]
        spec.save_hidden_states(texts, ids=["a/b", "two", "three"], loss_masks=masks)
    return folder


@pytest.mark.parametrize("strategy", KEYS)
def test_files_are_what_specforge_reads(folder: Path, tmp_path: Path, strategy: str) -> None:
    saved = SavedHiddenStates(folder)
    if strategy == "eagle3":
        files = export_specforge(saved, tmp_path)
        kept = [*saved.values()]
    else:
        with pytest.warns(UserWarning, match="'three' is not exported: .* two adjacent tokens"):
            files = export_specforge(saved, tmp_path, strategy=strategy)  # type: ignore[arg-type]
        kept = [*saved.values()][:2]
    assert files == [tmp_path / f"rows_0-2000/data_{index}.ckpt" for index in range(len(kept))]
    assert {*tmp_path.rglob("*")} == {*files, tmp_path / "rows_0-2000"}
    for file, record in zip(files, kept, strict=True):
        # As SpecForge loads it: mapped, so that batches read what they need.
        features = torch.load(file, weights_only=True, mmap=True)
        assert features.keys() == {"input_ids", "loss_mask", *KEYS[strategy]}
        count = len(record.input_ids)
        for name in ("input_ids", "loss_mask"):
            assert features[name].shape == (count,) and features[name].dtype == torch.int64
        names = ("hidden_state", "aux_hidden_state") if strategy == "eagle3" else (None, "hidden_states")
        aux, final = features[names[1]], features.get(names[0] or "target_last_hidden_states")
        assert aux.shape == (1, count, 3 * 64) and aux.dtype == torch.bfloat16
        assert torch.equal(aux[0], record.aux_hidden_state)
        assert torch.equal(features["input_ids"], record.input_ids)
        assert torch.equal(features["loss_mask"], record.loss_mask)
        assert final is None or (final.shape == (1, count, 64) and torch.equal(final[0], record.hidden_state))


def test_a_file_holds_one_text_alone(folder: Path, tmp_path: Path) -> None:
    (short, _, _) = export_specforge(SavedHiddenStates(folder), tmp_path)
    assert short.stat().st_size < 4 * 4 * 64 * 2 + 2 * 4 * 8 + 4000


def test_folders_of_two_thousand(tmp_path: Path) -> None:
    ids = torch.zeros(1, dtype=torch.int64)
    record = Record("x", ids, ids, torch.zeros(1, 2), torch.zeros(1, 6), (0, 1, 2))
    files = export_specforge({str(number): record for number in range(2001)}, tmp_path)
    assert [str(files[at].relative_to(tmp_path)) for at in (0, 1999, 2000)] == [
        "rows_0-2000/data_0.ckpt",
        "rows_0-2000/data_1999.ckpt",
        "rows_2000-4000/data_2000.ckpt",
    ]


def test_a_record_with_nan_is_left_out(tmp_path: Path) -> None:
    ids = torch.ones(2, dtype=torch.int64)
    bad = Record("bad", ids, ids, torch.full((2, 2), float("nan")), torch.zeros(2, 6), (0, 1, 2))
    good = Record("good", ids, ids, torch.zeros(2, 2), torch.zeros(2, 6), (0, 1, 2))
    with pytest.warns(UserWarning, match="'bad' is not exported: its hidden states hold NaN"):
        assert len(export_specforge({"bad": bad, "good": good}, tmp_path)) == 1


def test_what_would_be_trained_on_as_well_is_refused(folder: Path, tmp_path: Path) -> None:
    saved = SavedHiddenStates(folder)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "data_7.ckpt.gz").touch()
    with raises(InvalidInput, reason=re.compile(r"it holds feature files \(old/data_7\.ckpt\.gz\)")):
        export_specforge(saved, tmp_path)
    with raises(InvalidOption, name="strategy", reason=re.compile("choose from eagle3, dflash, domino, dspark")):
        export_specforge(saved, tmp_path / "new", strategy="medusa")  # type: ignore[arg-type]
