"""Prompts for measurements: built-in ones, lines of text files, and those of Spec-Bench's and HumanEval's files."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.errors import InvalidInput


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt. ``chat`` is False for text to continue without a template; None leaves the choice to the tokenizer."""

    name: str
    category: str
    text: str
    chat: bool | None = None


#: A line of a JSON lines file.
_FORM = '{"turns": ["Write a poem about a river."]}'


def read_prompts(path: Path) -> list[NamedPrompt]:
    """Read the prompts of a file, gzipped if the name ends in ``.gz``.

    A file whose name ends in ``.jsonl`` or ``.json`` has a JSON object in each line: Spec-Bench's (``turns``, of which
    the first is used) or HumanEval's (``prompt``, which is continued without a chat template). In other files each line
    is a prompt.

    Raises:
        InvalidInput: the file is not valid. The error names the file and the line.
    """
    packed = path.suffix.lower() == ".gz"
    as_json = (path.with_suffix("") if packed else path).suffix.lower() in (".jsonl", ".json")
    try:
        with gzip.open(path, "rt", encoding="utf-8-sig") if packed else path.open(encoding="utf-8-sig") as file:
            prompts = list(_prompts(file, path, as_json))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidInput(name=f"the prompt file {path}", reason=f"it cannot be read ({error})") from error
    if not prompts:
        raise InvalidInput(name=f"the prompt file {path}", reason="it holds no prompts")
    return prompts


def _prompts(lines: Iterator[str], path: Path, as_json: bool) -> Iterator[NamedPrompt]:
    for number, line in enumerate(lines, start=1):
        place = f"{path.name}:{number}"
        if line.strip() and not as_json:
            yield NamedPrompt(place, "prompts", line.strip())
        elif line.strip():
            try:
                yield _prompt(json.loads(line), place)
            except json.JSONDecodeError as error:
                reason = f"it is not JSON ({error}); it must be like {_FORM}. Plain lines are for files named *.txt"
                raise InvalidInput(name=f"line {number} of the prompt file {path}", reason=reason) from error
            except ValueError as error:
                raise InvalidInput(name=f"line {number} of the prompt file {path}", reason=str(error)) from error


def _prompt(fields: Any, place: str) -> NamedPrompt:
    if not isinstance(fields, dict) or not ("turns" in fields or "prompt" in fields):
        raise ValueError(f"it is not a JSON object with 'turns' (Spec-Bench) or 'prompt' (HumanEval), like {_FORM}")
    chat = "turns" in fields
    if chat and not (isinstance(fields["turns"], list) and fields["turns"]):
        raise ValueError("'turns' must be a list with at least one text")
    text = fields["turns"][0] if chat else fields["prompt"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError("its prompt must be a text that is not empty")
    name = str(fields.get("question_id", fields.get("task_id", place)))
    family = name.partition("/")[0] if "task_id" in fields else "prompts"
    return NamedPrompt(name, str(fields.get("category", family)), text, None if chat else False)


_STORY = (
    "The old lighthouse keeper climbed the stairs every evening at dusk. He lit the lamp, checked the wind, and wrote "
    "the weather into the book. No ship was lost on that coast in forty years."
)

_JOURNEY = (
    "Anna left Lisbon in March and took the night train to Madrid. In April she found work in Marseille, where her "
    "brother Paul owns a bakery. They plan to visit Vienna together in the summer."
)

_MUSEUM = (
    "The museum opens at nine in the mornning. Visitors can leave there coats at the entrance. The guided tour starts "
    "at ten and takes about one hour. The museum closes at six in the evening."
)

_CORRECT = "Fix the spelling mistakes in this text and write out the whole corrected text"

BUILT_IN = (
    NamedPrompt("repeat", "quoting", f"Repeat this text word for word:\n\n{_STORY}"),
    NamedPrompt("extract", "quoting", f"Extract all names and places from this text:\n\n{_JOURNEY}"),
    NamedPrompt("correct", "quoting", f"{_CORRECT}:\n\n{_MUSEUM}"),
    NamedPrompt(
        "write", "other", "Write the opening of a story about a clockmaker who finds a letter in an old watch."
    ),
    NamedPrompt("explain", "other", "Why does the moon have phases, and how long does one cycle take?"),
    NamedPrompt(
        "code", "other", "Write a Python function that returns the prime numbers below n, and explain how it works."
    ),
    NamedPrompt("compare", "other", "What is the difference between weather and climate?"),
    NamedPrompt("email", "other", "Write an email to a colleague that moves our meeting from Monday to Tuesday."),
    NamedPrompt("advise", "other", "Give three tips to someone who has just begun to run."),
)
