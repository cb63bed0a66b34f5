"""Texts of the user as training data."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from speccompile.cli.models import tiny_tokenizer
from speccompile.cli.prompts import read_prompts
from speccompile.errors import InvalidInput
from speccompile.training import SavedTexts
from speccompile.training.examples import Examples, read_examples
from speccompile.training.own_texts import read_own_texts
from speccompile.training.turn_files import read_turns
from support.errors import raises

TEXTS = ["The sea is blue.", "Two and two are four."]
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


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found = tiny_tokenizer()
    found.chat_template = TEMPLATE
    return found


def read(data: Any, tokenizer: PreTrainedTokenizerBase | None) -> Examples:
    return read_examples(data, 256, max_len=100, learn_from="answers", tokenizer=tokenizer)


def learnt(examples: Examples, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [tokenizer.decode(item.input_ids[item.loss_mask]) for item in examples]


@pytest.mark.parametrize("packed", [False, True])
def test_lines_of_json_are_read(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, packed: bool) -> None:
    talk = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
    objects = [{"text": TEXTS[0]}, {"messages": talk}, {"prompt": TEXTS[1]}]
    path = tmp_path / ("own.jsonl" + ".gz" * packed)
    text = "\n".join(map(json.dumps, objects))
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    for given in (path, str(path), [path]):
        examples = read(given, tokenizer)
        assert learnt(examples, tokenizer) == [TEXTS[0], "Hello.</s>", TEXTS[1]]
        assert examples.targets == ()


def test_a_list_of_texts_is_read(tokenizer: PreTrainedTokenizerBase) -> None:
    for given in (TEXTS, iter(TEXTS), [{"text": TEXTS[0]}, TEXTS[1]]):
        examples = read(given, tokenizer)
        assert learnt(examples, tokenizer) == TEXTS
        assert len({item.name for item in examples}) == 2


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"text": TEXTS[0]}), encoding="utf-8-sig")
    assert learnt(read(path, tokenizer), tokenizer) == TEXTS[:1]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(TEXTS[0], encoding="utf-8-sig")
    assert read_turns(prompts) == [[TEXTS[0]]] and [prompt.text for prompt in read_prompts(prompts)] == TEXTS[:1]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([*TEXTS, Path("x")], "item 2 is a PosixPath, and others are texts"),
        ([*TEXTS, ""], "the text is empty"),
        ([*TEXTS, __file__], f"item 2 is the path {re.escape(__file__)}, and others are texts"),
        ([*TEXTS, "my texts.jsonl"], "item 2 is the path my texts.jsonl, and others are texts"),
        (["my texts.jsonl"], "there is no such file or folder"),
        ("no-such-folder", "there is no such file or folder"),
        (["no-such-folder"], "there is no such file or folder"),
        ("a text alone", "there is no such file or folder"),
        (__file__, "your texts must be JSON lines"),
        (None, "they are a NoneType; give a folder"),
        ([TALK], "one of them is a list; give a folder"),
        (".", r"neither training texts .* give your texts as JSON lines"),
    ],
)
def test_other_data_is_refused(tokenizer: PreTrainedTokenizerBase, data: Any, reason: str) -> None:
    with raises(InvalidInput, reason=re.compile(reason)):
        read(data, tokenizer)


def test_texts_need_a_tokenizer() -> None:
    with raises(InvalidInput, name="the training data", reason=re.compile("give the target's tokenizer")):
        read(TEXTS, None)


def test_a_file_of_another_kind_is_not_called_damaged(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "own.txt"
    path.write_text("The sea is blue.")
    with raises(InvalidInput, name=f"the file {path}", reason=re.compile("your texts must be JSON lines")):
        read(path, tokenizer)
    with raises(InvalidInput, name=f"line 1 of the file {path}", reason=re.compile("it is not JSON .*each line must")):
        read_own_texts(path, tokenizer)
    with raises(InvalidInput, name=f"the file {path}", reason=re.compile("not a file of training texts")):
        SavedTexts(path)


# --- lines of files ------------------------------------------------------------------------------------------------


def test_what_an_assistant_says_is_learned(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    path = lines(tmp_path, {"id": 7, "conversations": TALK}, {"messages": TALK[:1]}, {"turns": ["a"]}, {"text": "abc"})
    talk, question, turn, text = read_own_texts(path, tokenizer)
    assert talk.name == "7" and text.name is None
    learned = [token for token, mask in zip(talk.ids, talk.mask, strict=True) if mask]
    assert tokenizer.decode(learned) == "yes</s>no</s>"
    assert tokenizer.decode(talk.ids) == "<user>hi</s><assistant>yes</s><user>and</s><assistant>no</s>"
    assert not any(question.mask)
    assert tokenizer.decode(turn.ids) == "<user>a</s><assistant>" and all(turn.mask)
    assert tokenizer.decode(text.ids) == "abc" and text.mask == [1, 1, 1]
    prefix = talk.truncated(5)
    assert (prefix.ids, prefix.mask) == (talk.ids[:5], talk.mask[:5])


def test_conversations_of_sharegpt_are_read(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """https://github.com/lm-sys/FastChat/blob/main/docs/training.md"""
    names = {"user": "human", "assistant": "gpt"}
    talk = [{"from": names[message["role"]], "value": message["content"]} for message in TALK]
    assert read_own_texts(lines(tmp_path, {"conversations": talk}), tokenizer) == read_own_texts(
        lines(tmp_path, {"conversations": TALK}), tokenizer
    )


def test_a_line_ends_with_a_newline_alone(tmp_path: Path) -> None:
    path, text = tmp_path / "texts.jsonl", "a\u2028b\x85c"
    path.write_text(json.dumps({"id": None, "text": text}, ensure_ascii=False), encoding="utf-8")
    (found,) = read_own_texts(path, tiny_tokenizer())
    assert found.ids == tiny_tokenizer()(text)["input_ids"] and found.name is None


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([1], "not a JSON object"),
        ({"id": 1}, "it must have 'conversations'"),
        ({"messages": [{"role": "user"}]}, "'role' and 'content'"),
        ({"messages": []}, "'role' and 'content'"),
        ({"messages": ["hi"]}, "'role' and 'content'"),
        ({"messages": 4}, "'role' and 'content'"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "'from' is one of human, user, gpt"),
        ({"messages": [TALK[0], {"role": "assistant", "content": None}]}, "content of message 1 .* got NoneType"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, "message 0 .* got list"),
        ({"turns": []}, "a list of texts"),
        ({"turns": [4]}, "value of 'turns' must be a text"),
        ({"prompt": ["a"]}, "value of 'prompt' must be a text"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, item: Any, message: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    path = lines(tmp_path, {"text": "a"}, item)
    with raises(InvalidInput, name=f"line 2 of the file {path}", reason=re.compile(message)):
        read_own_texts(path, tokenizer)


def test_files_that_hold_no_usable_texts_are_refused(tmp_path: Path) -> None:
    with raises(InvalidInput, reason=re.compile("cannot be read")):
        read_own_texts(tmp_path / "nothing", tiny_tokenizer())
    with raises(InvalidInput, reason=re.compile("no texts")):
        read_own_texts(lines(tmp_path), tiny_tokenizer())
    with raises(InvalidInput, reason=re.compile("no chat template")):
        read_own_texts(lines(tmp_path, {"messages": TALK}), tiny_tokenizer())
    backwards = "{% for message in messages | reverse %}{{ message['content'] }}{% endfor %}"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = backwards
    with raises(InvalidInput, reason=re.compile("differently once others follow")):
        read_own_texts(lines(tmp_path, {"messages": TALK}), tokenizer)
