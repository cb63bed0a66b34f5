"""``speccompile save-hidden-states``: a file of texts becomes records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speccompile.cli import app
from speccompile.cli.models import tiny_model, tiny_tokenizer
from speccompile.cli.texts import read_texts
from speccompile.errors import InvalidInput
from speccompile.hidden_states import SavedHiddenStates
from support.errors import raises

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "no"},
]


def lines(folder: Path, *objects: Any) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(f"{json.dumps(item)}\n" for item in objects))
    return path


def test_what_an_assistant_says_is_learned(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    path = lines(tmp_path, {"id": 7, "conversations": TALK}, {"messages": TALK[:1]}, {"turns": ["a"]}, {"text": "abc"})
    talk, question, turn, text = read_texts(path, tokenizer, 1000)
    assert talk.name == "7" and text.name is None
    learned = [token for token, mask in zip(talk.ids, talk.mask, strict=True) if mask]
    assert tokenizer.decode(learned) == "yes</s>no</s>"
    assert tokenizer.decode(talk.ids) == "<user>hi</s><assistant>yes</s><user>and</s><assistant>no</s>"
    assert not any(question.mask)
    assert tokenizer.decode(turn.ids) == "<user>a</s><assistant>" and all(turn.mask)
    assert tokenizer.decode(text.ids) == "abc" and text.mask == [1, 1, 1]
    prefix = read_texts(path, tokenizer, 5)[0]
    assert (prefix.ids, prefix.mask) == (talk.ids[:5], talk.mask[:5])


def test_a_line_ends_with_a_newline_alone(tmp_path: Path) -> None:
    path, text = tmp_path / "texts.jsonl", "a\u2028b\x85c"
    path.write_text(json.dumps({"id": None, "text": text}, ensure_ascii=False), encoding="utf-8")
    (found,) = read_texts(path, tiny_tokenizer(), 100)
    assert found.ids == tiny_tokenizer()(text)["input_ids"] and found.name is None


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([1], "not a JSON object"),
        ({"id": 1}, "none of"),
        ({"messages": [{"role": "user"}]}, "'role' and 'content'"),
        ({"messages": []}, "'role' and 'content'"),
        ({"messages": ["hi"]}, "'role' and 'content'"),
        ({"messages": 4}, "'role' and 'content'"),
        ({"turns": []}, "a list of texts"),
        ({"turns": [4]}, "'turns' has is not a text"),
        ({"prompt": ["a"]}, "'prompt' has is not a text"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, item: Any, message: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    path = lines(tmp_path, {"text": "a"}, item)
    with raises(InvalidInput, name=f"line 2 of the file {path}", reason=re.compile(message)):
        read_texts(path, tokenizer, 10)


def test_files_that_hold_no_usable_texts_are_refused(tmp_path: Path) -> None:
    with raises(InvalidInput, reason=re.compile("cannot be read")):
        read_texts(tmp_path / "nothing", tiny_tokenizer(), 10)
    with raises(InvalidInput, reason=re.compile("no texts")):
        read_texts(lines(tmp_path), tiny_tokenizer(), 10)
    with raises(InvalidInput, reason=re.compile("no chat template")):
        read_texts(lines(tmp_path, {"messages": TALK}), tiny_tokenizer(), 10)
    backwards = "{% for message in messages | reverse %}{{ message['content'] }}{% endfor %}"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = backwards
    with raises(InvalidInput, reason=re.compile("differently once others follow")):
        read_texts(lines(tmp_path, {"messages": TALK}), tokenizer, 10)


def test_the_command_writes_records_and_specforge_files(tmp_path: Path) -> None:
    path = lines(tmp_path, {"id": "one", "text": "an old lighthouse"}, {"text": "in the evening " * 20})
    arguments = ["save-hidden-states", "tiny", "--data", str(path), "--output", str(tmp_path / "out")]
    arguments += ["--layers", "0,1", "--max-len", "64", "--max-batch", "1", "--backend", "eager"]
    found = CliRunner().invoke(app, [*arguments, "--specforge", str(tmp_path / "features")])
    assert found.exit_code == 0, found.output
    assert "2 records written" in found.output and "2 feature files for SpecForge written" in found.output
    assert len([*(tmp_path / "features").rglob("*.ckpt")]) == 2
    saved = SavedHiddenStates(tmp_path / "out")
    assert saved["one"].input_ids.tolist() == tiny_tokenizer()("an old lighthouse")["input_ids"]
    assert saved["one"].aux_hidden_state.shape == (17, 2 * tiny_model().config.hidden_size)
    (other,) = saved.keys() - {"one"}
    # Its beginning: the token after it has to have a place.
    assert len(saved[other].input_ids) == 63
    for wrong, message in (
        (["--layers", "a"], "1,14,26"),
        (["--layers", "9"], "0 .. 1"),
        (["--max-new-tokens", "64"], "leaves none"),
    ):
        found = CliRunner().invoke(app, [*arguments, *wrong])
        assert found.exit_code == 2 and message in found.output
