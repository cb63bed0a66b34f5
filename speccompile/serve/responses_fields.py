"""Fields of ``/v1/responses`` that the engine supports: those of texts and of function calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from speccompile.serve.base_fields import Fields, TokenLimit, Whole, wrong
from speccompile.serve.fields import MOST_TOP_LOGPROBS, ChatBody, JsonSchema, ResponseFormat
from speccompile.serve.ignored import log_ignored
from speccompile.serve.responses_items import InputItem, messages_of
from speccompile.serve.responses_tools import AnyTool, FunctionTool, ToolChoice
from speccompile.serve.sampling_fields import SamplingFields
from speccompile.serve.template_fields import TemplateFields

#: Value of ``include`` for log-probabilities.
_LOGPROBS = "message.output_text.logprobs"
#: Reasons why fields have no effect.
_WITHOUT_EFFECT = {
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
            raise wrong("schema", "it must be given with type json_schema, and with no other")
        return self

    def as_chat(self) -> ResponseFormat:
        """The equivalent format of a chat."""
        schema = None if self.schema_ is None else JsonSchema(name=self.name or "answer", schema=self.schema_)
        return ResponseFormat(type=self.type, json_schema=schema)


class TextFields(Fields):
    """``text`` of a response."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(SamplingFields, TemplateFields):
    """Fields of ``/v1/responses``."""

    token_limits = ("max_output_tokens",)

    input: Annotated[list[InputItem], BeforeValidator(_items), Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: TokenLimit = Field(None, ge=1)
    text: TextFields | None = None
    tools: list[AnyTool] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    include: list[str] = Field(default_factory=list)
    top_logprobs: Whole = Field(0, ge=0, le=MOST_TOP_LOGPROBS)
    metadata: dict[str, Any] | None = None
    # No effect.
    store: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"
    max_tool_calls: Whole | None = Field(None, ge=0)
    prompt_cache_key: str | None = None
    client_metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _can_be_followed(self) -> ResponsesBody:
        self._check_tools()
        messages = messages_of(self.instructions, self.input)
        if not messages:
            raise wrong("input", "it has no message")
        self.check_continued(messages[-1].role, calls=bool(messages[-1].tool_calls))
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", f'it needs include=["{_LOGPROBS}"]')
        self._log_ignored()
        return self

    def _check_tools(self) -> None:
        if self.tools and not self.functions:
            raise wrong("tools", "the server runs no tools; give at least one of type function")
        if self.tool_choice not in ("none", "auto") and not self.tools:
            raise wrong("tool_choice", "it needs tools")
        if self.logprobs and self.tools and self.tool_choice != "none":
            reason = f'{_LOGPROBS} needs an answer without calls; use tool_choice "none", or /v1/chat/completions'
            raise wrong("include", reason)

    def _log_ignored(self) -> None:
        if len(self.functions) < len(self.tools):
            log_ignored("a tool of /v1/responses that is not a function", "the server runs no tools")
        if set(self.include) - {_LOGPROBS}:
            log_ignored(f"include of /v1/responses, except {_LOGPROBS},", "an answer has no such parts")
        for name, reason in _WITHOUT_EFFECT.items():
            if getattr(self, name) not in (None, False, "disabled"):
                log_ignored(f"{name} of /v1/responses", reason)

    @property
    def own_form(self) -> str | None:
        form = None if self.text is None else self.text.format
        return None if form is None or form.type == "text" else "text.format"

    @property
    def logprobs(self) -> bool:
        """Whether texts have the log-probabilities of their tokens."""
        return _LOGPROBS in self.include

    @property
    def functions(self) -> dict[int, FunctionTool]:
        """Functions that the model may call, by their index in ``tools``."""
        return {index: tool for index, tool in enumerate(self.tools) if isinstance(tool, FunctionTool)}

    def as_chat(self) -> ChatBody:
        """The equivalent request for a chat. All values have been validated."""
        shared = {name: getattr(self, name) for name in (*SamplingFields.model_fields, *TemplateFields.model_fields)}
        text, choice = self.text or TextFields(), self.tool_choice
        shared["verbosity"] = text.verbosity or self.verbosity
        return ChatBody.model_construct(
            **shared,
            messages=messages_of(self.instructions, self.input),
            tools=[tool.as_chat() for tool in self.functions.values()],
            tool_choice=choice if isinstance(choice, str) else choice.as_chat(),
            parallel_tool_calls=self.parallel_tool_calls,
            max_completion_tokens=self.max_output_tokens,
            response_format=None if text.format is None else text.format.as_chat(),
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
        )
