"""Texts of the user as token ids, with masks of the tokens that a draft head learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidInput
from speccompile.training.messages import read_messages
from speccompile.training.turn_files import parse_line, read_lines


@dataclass(frozen=True)
class OwnText:
    """A text.

    Args:
        ids: token ids.
        mask: 1 at tokens to learn from: the assistant's, or all without an assistant.
        name: name that the caller gave, or None.
    """

    ids: list[int]
    mask: list[int]
    name: str | None = None

    def truncated(self, most: int) -> OwnText:
        """The first ``most`` tokens."""
        return OwnText(self.ids[:most], self.mask[:most], self.name)


def read_own_texts(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[OwnText]:
    """Read a text from each JSON line.

    A line has ``conversations`` or ``messages`` (see :func:`~speccompile.training.messages.read_messages`; the chat
    template formats them), ``text`` or ``prompt`` (used directly), or ``turns`` (the first is used, as a user's).

    Raises:
        InvalidInput: a line is not valid. The error names the file and the line.
    """
    texts = []
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            try:
                texts.append(text_of_fields(parse_line(line), tokenizer))
            except ValueError as error:
                raise InvalidInput(name=f"line {number} of the file {path}", reason=str(error)) from error
    if not texts:
        raise InvalidInput(name=f"the file {path}", reason="it holds no texts")
    return texts


def own_text(text: str, tokenizer: PreTrainedTokenizerBase) -> OwnText:
    """Encode a text directly. All of its tokens are learnt.

    Raises:
        ValueError: the text is empty.
    """
    ids: list[int] = tokenizer(text)["input_ids"] if text else []
    if not ids:
        raise ValueError("the text is empty")
    return OwnText(ids, [1] * len(ids))


def text_of_fields(fields: Any, tokenizer: PreTrainedTokenizerBase) -> OwnText:
    """Read the text of one JSON line, see :func:`read_own_texts`.

    Raises:
        ValueError: ``fields`` are not such an object.
    """
    if not isinstance(fields, Mapping):
        raise ValueError("it is not a JSON object")
    name = None if fields.get("id") is None else str(fields["id"])
    for key in ("conversations", "messages"):
        if key in fields:
            ids, mask = _conversation(read_messages(fields[key]), tokenizer)
            return OwnText(ids, mask, name)
    for key in ("text", "prompt"):
        if key in fields:
            return replace(own_text(_string(fields[key], key), tokenizer), name=name)
    if "turns" in fields:
        turns = fields["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError("'turns' must be a list of texts")
        turn = _string(turns[0], "turns")
        if getattr(tokenizer, "chat_template", None) is None:
            return replace(own_text(turn, tokenizer), name=name)
        found = tokenizer.apply_chat_template(
            [{"role": "user", "content": turn}], add_generation_prompt=True, return_dict=True
        )
        ids = found["input_ids"]  # type: ignore[index, call-overload, assignment]
        return OwnText(ids, [1] * len(ids), name)
    raise ValueError("it must have 'conversations', 'messages', 'text', 'prompt' or 'turns'")


def _string(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the value of {key!r} must be a text")
    return value


def _conversation(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids of a conversation, and a mask with 1 at the assistant's tokens and at the end of each of its turns."""

    def encoded(count: int, *, answer: bool = False) -> list[int]:
        found = tokenizer.apply_chat_template(messages[:count], add_generation_prompt=answer, return_dict=True)
        ids: list[int] = found["input_ids"]  # type: ignore[index, call-overload, assignment]
        return ids

    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("the tokenizer has no chat template; give 'text'")
    for number, message in enumerate(messages):
        # Chat templates format other values in Python's notation.
        if not isinstance(message["content"], str):
            found = type(message["content"]).__name__
            raise ValueError(f"the content of message {number} must be a string, got {found}")
    ids = encoded(len(messages))
    mask = [0] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = len(encoded(number, answer=True)) if number else 0, encoded(number + 1)
            if ids[: len(end)] != end:
                raise ValueError("the chat template writes a message differently once others follow; give 'text'")
            mask[start : len(end)] = [1] * (len(end) - start)
    return ids, mask
