"""Prompt files in the layouts of published benchmarks. The files here are written by the tests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from speccompile.bench.prompt_files import BenchPrompt, read_prompt_file, spread
from speccompile.errors import InvalidInput
from support.errors import raises

#: An entry of each layout, and how it is read.
SPEED_BENCH = {
    "question_id": "7f3a",
    "category": "roleplay",
    "sub_category": "fantasy",
    "turns": ["You are a ferryman. Greet me.", "Where does the river end?"],
    "source": "ours",
    "src_id": "12",
    "difficulty": "easy",
    "multiturn": True,
}
SPEC_BENCH = {"question_id": 201, "category": "rag", "turns": ["What does the text state?"], "reference": ["Nothing."]}
HUMAN_EVAL = {
    "task_id": "HumanEval/3",
    "prompt": "def half(x):\n",
    "entry_point": "half",
    "canonical_solution": "    return x / 2\n",
    "test": "def check(candidate): ...\n",
}
GSM8K = {"question": "Ann has 3 pens and loses one. How many are left?", "answer": "3 - 1 = 2\n#### 2"}
SHARE_GPT = {
    "id": "QWJhYvA_0",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hello"},
        {"from": "gpt", "value": "Hello! How are you?"},
        {"from": "human", "value": "Fine"},
    ],
}
CHAT = {"messages": [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Red."}]}
LAYOUTS = [
    (SPEED_BENCH, BenchPrompt("7f3a", "roleplay", tuple(SPEED_BENCH["turns"]))),  # type: ignore[arg-type]
    (SPEC_BENCH, BenchPrompt("201", "rag", ("What does the text state?",))),
    (HUMAN_EVAL, BenchPrompt("HumanEval/3", "HumanEval", ("def half(x):\n",), chat=False)),
    (GSM8K, BenchPrompt("file.jsonl:1", "gsm8k", (GSM8K["question"],))),
    (SHARE_GPT, BenchPrompt("QWJhYvA_0", "prompts", ("Hello", "Fine"), system="Be brief.")),
    (CHAT, BenchPrompt("file.jsonl:1", "prompts", ("Name a colour.",))),
    ({"prompt": "Once upon a time"}, BenchPrompt("file.jsonl:1", "prompts", ("Once upon a time",), chat=False)),
]


@pytest.mark.parametrize(("entry", "expected"), LAYOUTS)
def test_a_layout_is_recognised_by_its_fields(tmp_path: Path, entry: dict[str, object], expected: BenchPrompt) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text(json.dumps(entry) + "\n")
    assert read_prompt_file(path) == [expected]


def test_a_file_can_be_one_json_list(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    # A conversation without a user's turn, as the published file has some.
    empty = {"id": "empty", "conversations": [{"from": "gpt", "value": "Hello"}]}
    path.write_text(json.dumps([SHARE_GPT, empty, {**CHAT, "id": "second"}], indent=1))
    assert [prompt.name for prompt in read_prompt_file(path)] == ["QWJhYvA_0", "second"]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"conversations": "text"}, "its messages must be a list of objects with 'from' and 'value'"),
        ({"messages": [{"role": "user"}]}, "a message must be an object with the texts 'role' and 'content'"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "a message is from 'tool'"),
        ({"question": "How many?", "answer": 3, "turns": []}, "'turns' must be a list with at least one text"),
        ({"text": "Once"}, "it is not a JSON object with 'turns'"),
    ],
)
def test_an_entry_of_no_layout_is_named(tmp_path: Path, entry: dict[str, object], reason: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps([GSM8K, entry], indent=1))
    with raises(InvalidInput, name=f"entry 2 of the prompt file {path}", reason=re.compile(re.escape(reason))):
        read_prompt_file(path)


def test_a_broken_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('[{"prompt": "a"}')
    with raises(InvalidInput, reason=re.compile("it is not JSON")):
        read_prompt_file(path)


def test_categories_rotate() -> None:
    prompts = [BenchPrompt(str(i), category, ("text",)) for i, category in enumerate("aaabbc")]
    assert [prompt.name for prompt in spread(prompts, 4)] == ["0", "3", "5", "1"]
