"""The fields of ``/v1/responses`` that the engine can follow: those of texts and of function calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from speccompile.serve.base_fields import Fields, TokenLimit, Whole, wrong
from speccompile.serve.fields import ChatBody, JsonSchema, ResponseFormat
from speccompile.serve.ignored import log_ignored
from speccompile.serve.responses_items import InputItem, messages_of
from speccompile.serve.responses_tools import AnyTool, FunctionTool, ToolChoice
from speccompile.serve.template_fields import Reasoning

#: Why a field has no effect.
_WITHOUT_EFFECT = {
    "include": "a response has nothing that could be included",
    "store": "the server stores nothing",
    "max_tool_calls": "the server runs no tools",
    "prompt_cache_key": "prompts with a known beginning reuse its KV without it",
    "client_metadata": "the server stores nothing",
    "truncation": "no prompt is cut; one that is too long is refused",
}


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


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
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesStreamOptions(Fields):
    """``stream_options`` of a response."""

    include_obfuscation: Literal[False] = False


class ResponsesBody(Fields):
    """Of ``/v1/responses``."""

    model: str | None = None
    input: Annotated[list[InputItem], BeforeValidator(_items), Field(min_length=1)]
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
    tools: list[AnyTool] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    metadata: dict[str, Any] | None = None
    # Without effect.
    include: list[str] = Field(default_factory=list)
    store: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"
    max_tool_calls: Whole | None = Field(None, ge=0)
    prompt_cache_key: str | None = None
    client_metadata: dict[str, Any] | None = None
    # vLLM's and the engine's names.
    ignore_eos: bool = False
    num_draft_tokens: Whole | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _can_be_followed(self) -> ResponsesBody:
        if self.tools and not self.functions:
            raise wrong("tools", "the server runs no tools; give at least one of type function")
        if self.tool_choice not in ("none", "auto") and not self.tools:
            raise wrong("tool_choice", "it needs tools")
        if "message.output_text.logprobs" in self.include:
            raise wrong("include", "only chats and completions have log-probabilities")
        if not messages_of(self.instructions, self.input):
            raise wrong("input", "it has no message")
        if len(self.functions) < len(self.tools):
            log_ignored("a tool of /v1/responses that is no function", "the server runs no tools")
        if self.text is not None and self.text.verbosity is not None:
            log_ignored("text.verbosity of /v1/responses", "a model writes as much as it does")
        for name, reason in _WITHOUT_EFFECT.items():
            if getattr(self, name) not in (None, False, [], "disabled"):
                log_ignored(f"{name} of /v1/responses", reason)
        return self

    @property
    def functions(self) -> dict[int, FunctionTool]:
        """The tools that can be called, by their places in ``tools``."""
        return {place: tool for place, tool in enumerate(self.tools) if isinstance(tool, FunctionTool)}

    def as_chat(self) -> ChatBody:
        """The same as a request for a chat."""
        choice = self.tool_choice
        form = None if self.text is None else self.text.format
        response_format = None
        if form is not None:
            schema = None
            if form.schema_ is not None:
                schema = JsonSchema(name=form.name or "answer", schema=form.schema_)
            response_format = ResponseFormat(type=form.type, json_schema=schema)
        fields = {
            "model": self.model,
            "messages": messages_of(self.instructions, self.input),
            "tools": [tool.as_chat() for tool in self.functions.values()] or None,
            "tool_choice": choice if isinstance(choice, str) else choice.as_chat(),
            "parallel_tool_calls": self.parallel_tool_calls,
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
