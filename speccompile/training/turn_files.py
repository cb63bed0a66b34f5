"""User turns from files."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speccompile.errors import InvalidInput
from speccompile.training.messages import read_messages


def read_turns(path: Path) -> list[list[str]]:
    """Read the user turns of each conversation of a file. Empty lines are left out.

    A file whose name ends in ``.jsonl`` has a JSON object in each line: ``turns`` (a list of texts), ``messages`` or
    ``conversations`` (:func:`~speccompile.training.messages.read_messages`), ``prompt`` or ``text``. In other files
    each line is a conversation of one turn. A name may also end in ``.gz``.

    Raises:
        InvalidInput: a line is not valid. The error names the file and the line.
    """
    found = list(_conversations(read_lines(path), path, is_json_lines(path)))
    if not found:
        raise InvalidInput(name=f"the file {path}", reason="it has no user turns")
    return found


def is_json_lines(path: Path) -> bool:
    """Return whether a file has a JSON object in each line, judged by its name."""
    return path.name.lower().endswith((".jsonl", ".jsonl.gz"))


def read_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 file, whose name may end in ``.gz``, without a byte order mark.

    Raises:
        InvalidInput: the file cannot be read.
    """
    packed = path.suffix.lower() == ".gz"
    try:
        with gzip.open(path, "rt", encoding="utf-8-sig") if packed else path.open(encoding="utf-8-sig") as file:
            # splitlines() would also split at other characters than the newline.
            return file.read().split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidInput(name=f"the file {path}", reason=f"it cannot be read ({error})") from error


def parse_line(line: str) -> Any:
    """Parse a line of a JSON lines file.

    Raises:
        ValueError: the line is not JSON.
    """
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f'it is not JSON ({error}); each line must be an object such as {{"text": "..."}}') from error


def _conversations(lines: list[str], path: Path, as_json: bool) -> Iterator[list[str]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if not as_json:
            yield [line.strip()]
            continue
        try:
            yield _turns(parse_line(line))
        except ValueError as error:
            raise InvalidInput(name=f"line {number} of the file {path}", reason=str(error)) from error


def _turns(fields: Any) -> list[str]:
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    turns: Any = None
    if "turns" in fields:
        turns = fields["turns"]
    elif "messages" in fields or "conversations" in fields:
        messages = read_messages(fields.get("messages", fields.get("conversations")))
        turns = [message["content"] for message in messages if message["role"] == "user"]
    elif "prompt" in fields or "text" in fields:
        turns = [fields.get("prompt", fields.get("text"))]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise ValueError("it must have user turns as 'turns', 'messages', 'conversations', 'prompt' or 'text'")
    return turns
