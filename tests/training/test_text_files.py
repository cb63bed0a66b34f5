"""Files of training texts and of user turns, and the options of ``make_texts``."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speccompile.errors import CorruptTexts, InvalidInput, InvalidOption
from speccompile.training import Source, TextOptions, TrainingText, make_texts, read_texts
from speccompile.training.filters import repeats
from speccompile.training.text_files import Progress, encode
from speccompile.training.turn_files import read_turns
from support.docstrings import paragraphs
from support.errors import raises

SOURCE = Source("Model", 1000, {"seed": 0})


def file_of(folder: Path, number: int = 1, source: Source = SOURCE, count: int = 3) -> Path:
    path = folder / f"texts_{number:06d}.npz"
    texts = [TrainingText(torch.arange(index, index + 5), 2, index) for index in range(count)]
    path.write_bytes(encode(source, Progress(count, {"long": number}), texts))
    return path


def test_texts_come_back_as_they_were(tmp_path: Path) -> None:
    file_of(tmp_path, 1)
    file_of(tmp_path, 2, count=0)
    file_of(tmp_path, 3, count=1)
    texts = read_texts(tmp_path)
    assert (len(texts), texts.tokens, texts.source, dict(texts.dropped)) == (4, 20, SOURCE, {"long": 3})
    assert [(text.number, text.answer_start, text.input_ids.tolist()) for text in texts] == [
        (index, 2, list(range(index, index + 5))) for index in (0, 1, 2, 0)
    ]
    assert len(read_texts(tmp_path / "texts_000001.npz")) == 3


def test_a_token_takes_two_bytes_before_compression_and_numpy_reads_it(tmp_path: Path) -> None:
    with np.load(file_of(tmp_path)) as arrays:
        assert arrays["tokens"].dtype == np.uint16
        assert arrays["starts"].tolist() == [0, 5, 10, 15]
        assert json.loads(str(arrays["about"]))["target"] == "Model"


def test_damaged_and_foreign_files_are_named(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    data = path.read_bytes()
    for damaged in (data[:-40], data[:100], b"", data[:300] + bytes(50) + data[350:]):
        path.write_bytes(damaged)
        with raises(CorruptTexts, path=str(path)):
            list(read_texts(tmp_path))
    np.savez(path, tokens=np.zeros(3))
    with raises(CorruptTexts, path=str(path)):
        read_texts(tmp_path)
    with raises(InvalidInput):
        read_texts(tmp_path / "nowhere")
    file_of(tmp_path)
    file_of(tmp_path, 2, Source("Model", 1000, {"seed": 1}))
    with raises(InvalidInput):
        read_texts(tmp_path)


def test_user_turns_are_read_from_lines_and_json_lines(tmp_path: Path) -> None:
    plain = tmp_path / "turns.txt"
    plain.write_text("first\n\n second \u2028 line\n")
    assert read_turns(plain) == [["first"], ["second \u2028 line"]]
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    items: list[Any] = [
        {"turns": ["a", "b"]},
        {"messages": talk},
        {"conversations": talk},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "p"},
        {"text": "t"},
    ]
    packed = tmp_path / "turns.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, items)).encode()))
    assert read_turns(packed) == [["a", "b"], ["a", "c"], ["a", "c"], ["a"], ["p"], ["t"]]


@pytest.mark.parametrize("line", ["[1]", "{", '{"id": 1}', '{"turns": []}', '{"prompt": 4}', '{"messages": ["hi"]}'])
def test_a_wrong_line_of_user_turns_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "turns.jsonl"
    path.write_text(f'{{"text": "a"}}\n{line}\n')
    with raises(InvalidInput, name=f"line 2 of the file {path}"):
        read_turns(path)


def test_files_without_user_turns_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    for path in (empty, tmp_path / "nowhere"):
        with raises(InvalidInput, name=f"the file {path}"):
            read_turns(path)


def test_a_list_is_no_repetition_and_a_loop_is_one() -> None:
    assert repeats([1, 2, 3, 4, 5] * 10) and repeats([*range(20), *[7] * 20])
    assert not repeats([1, 2, 3] * 5) and not repeats(list(range(100)))
    assert not repeats([token for item in range(20) for token in (900, 901, item, item + 100, item + 200)])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", 0),
        ("seed", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("user_top_p", "a"),
        ("max_user_tokens", 1.5),
        ("draw", 1),
        ("prompts", 4),
        ("exclude", "nowhere.txt"),
    ],
)
def test_wrong_options_are_named(name: str, value: Any) -> None:
    with raises(InvalidOption, where="make_texts", name=name):
        TextOptions(**{name: value})


def test_the_docstring_has_all_parameters() -> None:
    assert {"spec", "output", "progress"} <= paragraphs(make_texts).keys()
