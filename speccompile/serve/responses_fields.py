"""The fields of ``/v1/responses`` that the engine can follow: those of texts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from speccompile.serve.base_fields import Fields, TokenLimit, Whole, wrong
from speccompile.serve.fields import ChatBody, JsonSchema, Message, ResponseFormat
from speccompile.serve.template_fields import Reasoning

_TEXT_PARTS = ("input_text", "output_text", "text")


def _text_of(value: Any) -> Any:
    """A text, also where it is given in parts. Parts of earlier answers have annotations, which say nothing here."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ValueError('a part has to be {"type": "input_text", "text": ...}, since the model reads text alone')
    return "".join(part["text"] for part in value)


def _messages(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class InputMessage(Fields):
    """A message, or one of an earlier answer's ``output``."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of)]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class TextFormat(Fields):
    """``json_schema``, ``json_object`` or ``text``."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise wrong("schema", "it has to be given with type json_schema, and with no other")
        return self


class TextOptions(Fields):
    """``text`` of a response."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesStreamOptions(Fields):
    """``stream_options`` of a response."""

    include_obfuscation: Literal[False] = False


class ResponsesBody(Fields):
    """Of ``/v1/responses``."""

    model: str | None = None
    input: Annotated[list[InputMessage], BeforeValidator(_messages), Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: TokenLimit = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    reasoning: Reasoning | None = None
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    text: TextOptions | None = None
    user: str | None = Field(None, max_length=256)
    safety_identifier: str | None = Field(None, max_length=256)
    # vLLM's and the engine's names.
    ignore_eos: bool = False
    num_draft_tokens: Whole | None = Field(None, ge=0)

    def as_chat(self) -> ChatBody:
        """The same as a request for a chat."""
        messages = [Message(role=item.role, content=item.content) for item in self.input]
        if self.instructions is not None:
            messages.insert(0, Message(role="system", content=self.instructions))
        form = None if self.text is None else self.text.format
        response_format = None
        if form is not None:
            schema = None
            if form.schema_ is not None:
                schema = JsonSchema(name=form.name or "answer", schema=form.schema_)
            response_format = ResponseFormat(type=form.type, json_schema=schema)
        fields = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "response_format": response_format,
            "reasoning": self.reasoning,
            "user": self.user,
            "safety_identifier": self.safety_identifier,
            "ignore_eos": self.ignore_eos,
            "num_draft_tokens": self.num_draft_tokens,
        }
        return ChatBody.model_validate(fields)
