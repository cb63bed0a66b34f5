"""Prompts from files in the layouts of published benchmarks. The layout is recognised by the fields of an entry.

| layout | fields |
|---|---|
| Spec-Bench, MT-Bench, SPEED-Bench | ``turns``, ``question_id``, ``category`` |
| HumanEval | ``task_id``, ``prompt``; continued without a chat template |
| GSM8K | ``question``, ``answer`` |
| ShareGPT, chats | ``conversations`` (``from``, ``value``) or ``messages`` (``role``, ``content``) |
| plain | ``prompt``, continued without a chat template; or lines of text |
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from speccompile.errors import InvalidInput


@dataclass(frozen=True)
class BenchPrompt:
    """A conversation: the user's turns, each of which follows the model's own answer to the one before.

    Args:
        name: the published id, or the file and the line. It is unique in a run.
        chat: False for text to continue without a template; None leaves the choice to the tokenizer.
        system: the system message; empty if there is not one.
    """

    name: str
    category: str
    turns: tuple[str, ...]
    chat: bool | None = None
    system: str = ""


#: A line of a JSON lines file.
_FORM = '{"turns": ["Write a poem about a river."]}'
_USERS, _MODELS = ("user", "human"), ("assistant", "gpt", "chatgpt", "bing", "bard")


def read_prompt_file(path: Path) -> list[BenchPrompt]:
    """Read the prompts of a file, gzipped if the name ends in ``.gz``.

    A file whose name ends in ``.jsonl`` or ``.json`` has a JSON object in each line, or is one JSON list. In other
    files each line is a prompt. Conversations in which no user speaks, as ShareGPT has some, are left out.

    Raises:
        InvalidInput: the file is not valid. The error names the file and the line.
    """
    packed = path.suffix.lower() == ".gz"
    as_json = (path.with_suffix("") if packed else path).suffix.lower() in (".jsonl", ".json")
    try:
        with gzip.open(path, "rt", encoding="utf-8-sig") if packed else path.open(encoding="utf-8-sig") as file:
            prompts = list(_prompts(file.read(), path, as_json))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidInput(name=f"the prompt file {path}", reason=f"it cannot be read ({error})") from error
    if not prompts:
        raise InvalidInput(name=f"the prompt file {path}", reason="it holds no prompts")
    return prompts


def spread(prompts: Sequence[BenchPrompt], count: int) -> list[BenchPrompt]:
    """The first ``count`` prompts when the categories rotate, in the order in which they first occur."""
    by_category: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    rounds = chain.from_iterable(zip_longest(*by_category.values()))
    return [prompt for prompt in rounds if prompt is not None][:count]


def _prompts(text: str, path: Path, as_json: bool) -> Iterator[BenchPrompt]:
    if not as_json:
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield BenchPrompt(f"{path.name}:{number}", "prompts", (line.strip(),))
        return
    for kind, number, entry in _entries(text, path):
        try:
            if (prompt := _prompt(entry, f"{path.name}:{number}")) is not None:
                yield prompt
        except ValueError as error:
            raise InvalidInput(name=f"{kind} {number} of the prompt file {path}", reason=str(error)) from error


def _entries(text: str, path: Path) -> Iterator[tuple[str, int, Any]]:
    """The entries of a file with what they are called and their numbers."""
    if text.lstrip().startswith("["):
        try:
            yield from (("entry", number, entry) for number, entry in enumerate(json.loads(text), start=1))
            return
        except json.JSONDecodeError as error:
            if "\n" not in text.strip():
                raise InvalidInput(name=f"the prompt file {path}", reason=f"it is not JSON ({error})") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield "line", number, json.loads(line)
            except json.JSONDecodeError as error:
                reason = f"it is not JSON ({error}); it must be like {_FORM}. Plain lines are for files named *.txt"
                raise InvalidInput(name=f"line {number} of the prompt file {path}", reason=reason) from error


def _prompt(fields: Any, place: str) -> BenchPrompt | None:
    system, chat, family = "", None, "prompts"
    if not isinstance(fields, dict):
        raise _unknown()
    if "turns" in fields:
        turns = fields["turns"]
        if not (isinstance(turns, list) and turns):
            raise ValueError("'turns' must be a list with at least one text")
    elif "conversations" in fields or "messages" in fields:
        system, turns = _chat(fields)
        if not turns:
            return None
    elif "question" in fields and "answer" in fields:
        turns, family = [fields["question"]], "gsm8k"
    elif "prompt" in fields:
        turns, chat = [fields["prompt"]], False
    else:
        raise _unknown()
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError("its prompt must be a text that is not empty")
    name = str(next((fields[key] for key in ("question_id", "task_id", "id") if key in fields), place))
    if "task_id" in fields:
        family = name.partition("/")[0]
    return BenchPrompt(name, str(fields.get("category", family)), tuple(turns), chat, system)


def _unknown() -> ValueError:
    return ValueError(
        "it is not a JSON object with 'turns' (Spec-Bench, MT-Bench, SPEED-Bench), 'prompt' (HumanEval), 'question' "
        f"and 'answer' (GSM8K), 'conversations' (ShareGPT) or 'messages', like {_FORM}"
    )


def _chat(fields: dict[str, Any]) -> tuple[str, list[Any]]:
    """The system message, and the user's turns. Answers of other models are left out: the target answers."""
    shared = "conversations" in fields
    who, what = ("from", "value") if shared else ("role", "content")
    messages: Iterable[Any] = fields["conversations" if shared else "messages"]
    if not isinstance(messages, list):
        raise ValueError(f"its messages must be a list of objects with {who!r} and {what!r}")
    system, turns = "", []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get(what), str):
            raise ValueError(f"a message must be an object with the texts {who!r} and {what!r}")
        role = message.get(who)
        if role in _USERS:
            turns.append(message[what])
        elif role == "system":
            system = message[what]
        elif role not in _MODELS:
            raise ValueError(f"a message is from {role!r}; it must be from system, {', '.join((*_USERS, *_MODELS))}")
    return system, turns
