"""Files of records: nothing that was reported as written is lost, whenever the process is killed."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Set
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from speccompile.errors import CorruptRecords, InvalidInput, InvalidOption, RecordsNotWritten
from speccompile.hidden_states import Record, SavedHiddenStates, SaveHiddenStates
from speccompile.hidden_states.records import About
from speccompile.hidden_states.writer import RecordWriter
from support.errors import raises
from support.killed import killed

ABOUT = About("Model", "1234", (1, 2), "float32")
KILLS = 24


def record(number: int, length: int = 5) -> Record:
    """Filled with its number, so that a mixed-up or torn one shows."""
    ids = torch.full((length,), number, dtype=torch.int64)
    return Record(
        str(number),
        ids,
        torch.ones_like(ids),
        torch.full((length, 4), 1.0 * number),
        ids[:, None].expand(length, 8) * 2.0,
        ABOUT.layers,
    )


def writer(folder: Path, interval: int = 3, prefix: str = "data", about: About = ABOUT) -> RecordWriter:
    return RecordWriter(SaveHiddenStates(folder, interval, prefix), about)


def fill(to: RecordWriter, numbers: range) -> None:
    for number in numbers:
        to.reserve(str(number))
        to.add(record(number))


def assert_whole(folder: Path, known: Set[str] = frozenset()) -> set[str]:
    """What is there; of those ``known`` the values are not compared."""
    found = SavedHiddenStates(folder)
    for id in set(found) - known:
        read = found[id]
        wanted = record(int(id), len(read.input_ids))
        for field in ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state"):
            assert torch.equal(getattr(read, field), getattr(wanted, field)), (id, field)
    return set(found)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    to = writer(tmp_path)
    fill(to, range(7))
    to.flush()
    assert to.written == {str(number) for number in range(7)} == assert_whole(tmp_path)
    # Two files of three, and what was left.
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        f"data_00000{n}.safetensors" for n in (1, 2, 3)
    ]
    assert SavedHiddenStates(tmp_path).about == ABOUT
    to.close()


def test_the_fields_of_others(tmp_path: Path) -> None:
    to = writer(tmp_path)
    fill(to, range(1))
    to.close()
    read = SavedHiddenStates(tmp_path)["0"]
    shapes = {name: tuple(value.shape) for name, value in read.as_specforge().items()}
    assert shapes == {"input_ids": (5,), "loss_mask": (5,), "hidden_state": (1, 5, 4), "aux_hidden_state": (1, 5, 8)}
    other = read.as_trtllm()
    assert other.pop("id") == "0"
    shapes = {name: tuple(value.shape) for name, value in other.items()}
    assert shapes == {"input_ids": (5,), "hidden_state": (5, 4), "aux_hidden_states": (5, 8)}


def test_tensorrt_llm_has_no_captured_layers_beside_the_final_norm_alone(tmp_path: Path) -> None:
    """With ``eagle3_layers_to_capture={-1}`` its files have no ``aux_hidden_states``."""
    to = writer(tmp_path, about=replace(ABOUT, layers=(-1,)))
    to.reserve("0")
    to.add(replace(record(0), aux_hidden_state=record(0).hidden_state.clone(), layers=(-1,)))
    to.close()
    read = SavedHiddenStates(tmp_path)["0"]
    assert list(read.as_trtllm()) == ["id", "input_ids", "hidden_state"]
    assert read.as_specforge()["aux_hidden_state"].shape == (1, 5, 4)
    with_another = replace(read, layers=(1, -1))
    assert "aux_hidden_states" in with_another.as_trtllm()


def test_what_waits_is_not_told(tmp_path: Path) -> None:
    to = writer(tmp_path, interval=10)
    fill(to, range(9))
    assert not to.written and not list(tmp_path.glob("*.safetensors"))
    to.close()
    assert len(to.written) == 9


def child(folder: Path, pipe: int) -> None:
    """Write records of some size until killed, and report those that are written."""
    to = writer(folder, interval=2)
    reported = set(to.written)
    os.write(pipe, b"\n")
    for number in range(10_000):
        if str(number) in to.written:
            continue
        to.reserve(str(number))
        to.add(record(number, length=2000))
        new = to.written - reported
        reported |= new
        os.write(pipe, "".join(f"{id}\n" for id in new).encode())


def test_killed_at_any_moment(tmp_path: Path) -> None:
    chance, reported, partial = random.Random(0), set(), 0
    whole: set[str] = set()
    for _ in range(KILLS):
        reported |= killed(child, tmp_path, chance.uniform(0, 0.08))
        whole = assert_whole(tmp_path, whole)
        assert reported <= whole
        partial += bool(list(tmp_path.glob(".*.partial")))
    # It was hit while it wrote, and it went on where it had stopped.
    assert partial and len(reported) > 10
    # Nor was what had been written before harmed later.
    assert whole == assert_whole(tmp_path)
    to = writer(tmp_path)
    assert reported <= to.written
    assert not list(tmp_path.glob(".*.partial"))
    to.close()


def test_one_process_a_prefix(tmp_path: Path) -> None:
    to = writer(tmp_path)
    with raises(InvalidOption, name="output_directory", reason=re.compile("file_prefix='data'")):
        writer(tmp_path)
    other = writer(tmp_path, prefix="more")
    fill(to, range(3))
    fill(other, range(3, 6))
    to.close()
    other.close()
    assert assert_whole(tmp_path) == {str(number) for number in range(6)}
    writer(tmp_path).close()


def test_prefixes_that_begin_alike(tmp_path: Path) -> None:
    """None takes away what another one is writing."""
    longer = writer(tmp_path, prefix="data_b")
    being_written, left = tmp_path / ".data_b_000001.safetensors.partial", tmp_path / ".data_000007.safetensors.partial"
    being_written.touch()
    left.touch()
    writer(tmp_path).close()
    assert being_written.exists() and not left.exists()
    longer.close()


def test_any_prefix_goes_on_counting(tmp_path: Path) -> None:
    """What stands for other letters in patterns of names, too: nothing that is there is written over."""
    for start in (0, 3):
        to = writer(tmp_path, prefix="run[1]")
        fill(to, range(start, start + 3))
        to.close()
    assert assert_whole(tmp_path) == {str(number) for number in range(6)}


def test_a_writer_that_is_refused_leaves_the_folder_free(tmp_path: Path) -> None:
    to = writer(tmp_path)
    fill(to, range(3))
    to.close()
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptRecords) as reported:
        writer(tmp_path)
    path.unlink()
    # The traceback, which an interactive session keeps, knows the writer.
    assert reported.tb is not None
    writer(tmp_path).close()


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    to = writer(tmp_path)
    fill(to, range(3))
    to.close()
    with raises(InvalidOption, name="output_directory", reason=re.compile("records of About.*5678")):
        writer(tmp_path, about=About("Model", "5678", (1, 2), "float32"))
    # What is none of ours does not matter.
    (tmp_path / "model.safetensors").write_bytes(save({"w": torch.ones(1)}))
    writer(tmp_path).close()
    with raises(InvalidInput, reason=re.compile("it does not exist")):
        SavedHiddenStates(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with raises(InvalidOption, name="output_directory", reason=re.compile("cannot be written")):
        writer(tmp_path / "file")


def test_two_that_begin_with_something_else(tmp_path: Path) -> None:
    """None of them has written anything yet."""
    first = writer(tmp_path, prefix="a")
    with raises(InvalidOption, name="output_directory", reason=re.compile("writes records of.*give another folder")):
        writer(tmp_path, prefix="b", about=replace(ABOUT, layers=(1,)))
    beside = writer(tmp_path, prefix="b")
    beside.close()
    first.close()
    # Who has written nothing claims nothing any more.
    other = writer(tmp_path, prefix="a", about=replace(ABOUT, layers=(1,)))
    # What a killed process leaves excludes no other process.
    (tmp_path / ".killed.about").write_text(repr(ABOUT))
    (tmp_path / ".killed.lock").touch()
    third = writer(tmp_path, prefix="c", about=replace(ABOUT, layers=(1,)))
    third.close()
    other.close()


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    to = writer(tmp_path)
    fill(to, range(3))
    to.close()
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with raises(CorruptRecords, path=str(path)):
        SavedHiddenStates(tmp_path)


def test_an_id_is_taken_once(tmp_path: Path) -> None:
    to = writer(tmp_path, interval=1)
    assert [to.reserve(), to.reserve(), to.reserve("mine")] == ["data-0", "data-1", "mine"]
    with raises(InvalidOption, name="record", value="mine"):
        to.reserve("mine")
    to.cancel("mine")
    assert to.reserve("mine") == "mine"
    to.add(replace(record(1), id="data-1"))
    to.close()
    again = writer(tmp_path)
    with pytest.raises(InvalidOption):
        again.reserve("data-1")
    # The one that was given up with the process is free, and numbers go on, past what another process took.
    assert [again.reserve("mine"), again.reserve("data-2"), again.reserve()] == ["mine", "data-2", "data-3"]
    again.close()


def test_numbers_of_two_processes_differ(tmp_path: Path) -> None:
    both = [writer(tmp_path), writer(tmp_path, prefix="more")]
    for to in both:
        for number in range(4):
            to.add(replace(record(number), id=to.reserve()))
    for to in both:
        to.close()
    assert len(SavedHiddenStates(tmp_path)) == 8


def test_a_record_that_cannot_be_made_takes_no_other_along(tmp_path: Path) -> None:
    to = writer(tmp_path, interval=10)
    fill(to, range(3))
    to.fail(MemoryError("no memory"))
    with raises(RecordsNotWritten, reason=re.compile("no memory")):
        to.reserve()
    with raises(RecordsNotWritten, reason=re.compile("no memory")):
        to.close()
    assert assert_whole(tmp_path) == {"0", "1", "2"}


def test_a_full_disk_is_an_error_that_loses_no_written_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = writer(tmp_path, interval=2)
    fill(to, range(2))
    to.flush()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    fill(to, range(2, 4))
    with raises(RecordsNotWritten, reason=re.compile("No space left")):
        to.flush()
    # No more is computed of what cannot be kept.
    with pytest.raises(RecordsNotWritten):
        to.reserve()
    assert to.written == {"0", "1"} == assert_whole(tmp_path)
    with pytest.raises(RecordsNotWritten):
        to.close()
    monkeypatch.undo()
    again = writer(tmp_path, interval=2)
    fill(again, range(2, 4))
    again.close()
    assert assert_whole(tmp_path) == {"0", "1", "2", "3"}
