"""Fields of a chat's messages, in the forms that clients send."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import from_json

from speccompile.serve.base_fields import Fields, wrong
from speccompile.serve.ignored import log_ignored
from speccompile.serve.image_parts import IMAGE_URL, url_of

_TEXT_PARTS = ("text", "input_text", "output_text")
#: Fields of the API.
_PART_FIELDS = {"type", "text", "refusal", "annotations", "logprobs"}


class OpenFields(Fields):
    """Fields of one object to which clients add other fields. Only a chat template can read these."""

    model_config = ConfigDict(extra="allow")


def joined_parts(value: Any) -> Any:
    """Convert a text in parts to one text, joined with newlines. Other fields of a part, such as ``cache_control``,
    have no effect."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("it must be a text, or a list of parts of type text")
    return "\n".join(_text_of_part(part) for part in value)


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if kind in (*_TEXT_PARTS, "refusal") else None
    if not isinstance(text, str):
        raise ValueError('a part must be {"type": "text", "text": ...}, since the model reads only text')
    if part.keys() - _PART_FIELDS:
        log_ignored("cache_control, or another field of a text part,", "only the text is read")
    return text


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == IMAGE_URL


Content = Annotated[str, BeforeValidator(joined_parts)]


def _arguments(value: Any) -> Any:
    """Parse a call's arguments to an object. Of a JSON text that ``max_tokens`` truncated, use the part that is
    there."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if not text or text == "null":
        return {}
    try:
        parsed, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        parsed, end = _cut_json(text), len(text)
    if not isinstance(parsed, dict) or end < len(text):
        raise ValueError("it must be an object, or the JSON text of one, which may be cut at its end")
    return parsed


def _cut_json(text: str) -> Any:
    try:
        return from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return None


#: Arguments of a call. Clients also send an empty text, or a truncated one.
CallArguments = Annotated[dict[str, Any], BeforeValidator(_arguments)]


class CalledFunction(OpenFields):
    """The function of a tool call in a message."""

    name: str
    arguments: CallArguments = Field(default_factory=dict)


class ToolCall(OpenFields):
    """A call of the model earlier in the conversation."""

    id: str | None = None
    function: CalledFunction
    type: Literal["function"] = "function"


@dataclass(frozen=True)
class ImageUrl:
    """An image of a message, by its data URL."""

    url: str


class Message(OpenFields):
    """A message of a chat. Its content is never None: of a content with images it is the text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    # A spoken answer, which the client refers to by an id.
    audio: None = None
    reasoning_content: str | None = None
    _parts: tuple[str | ImageUrl, ...] = PrivateAttr(())

    @property
    def parts(self) -> tuple[str | ImageUrl, ...]:
        """Texts and images of a content with images, in order; empty without images."""
        return self._parts

    @model_validator(mode="wrap")
    @classmethod
    def _with_images(cls, given: Any, handler: ModelWrapValidatorHandler[Message]) -> Message:
        """Keep the images of a content apart from its text."""
        content = given.get("content") if isinstance(given, dict) else None
        if not isinstance(content, list) or not any(map(_is_image, content)):
            return handler(given)
        texts = [part for part in content if not _is_image(part)]
        message = handler({**given, "content": texts})
        if message.role != "user":
            raise wrong("content", "only a user's message has images")
        try:
            found = [ImageUrl(url_of(part)) if _is_image(part) else _text_of_part(part) for part in content]
        except ValueError as error:
            raise wrong("content", str(error)) from None
        message._parts = tuple(found)
        return message

    @model_validator(mode="before")
    @classmethod
    def _in_one_spelling(cls, given: Any) -> Any:
        """Convert older and alternative names: ``function_call``, the role ``function``, ``reasoning``."""
        if not isinstance(given, dict):
            return given
        message = dict(given)
        if message.get("content", "") is None:
            message["content"] = ""
        if message.get("role") == "function":
            message["role"] = "tool"
        if not message.get("tool_calls") and (call := message.pop("function_call", None)) is not None:
            message["tool_calls"] = [{"function": call}]
        if message.get("reasoning_content") is None and isinstance(message.get("reasoning"), str):
            message["reasoning_content"] = message["reasoning"]
        return message

    @model_validator(mode="after")
    def _fits_role(self) -> Message:
        if self.role == "assistant":
            self.content = self.content or self.refusal or ""
            return self
        if "content" not in self.model_fields_set:
            raise wrong("content", "it is missing")
        if self.tool_calls:
            raise wrong("tool_calls", "only an assistant's message has them")
        if self.role == "tool" and self.tool_call_id is None and self.name is None:
            raise wrong("tool_call_id", "a tool's message needs it")
        return self
