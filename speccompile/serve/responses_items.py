"""Input items of ``/v1/responses``, and their conversion to a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from speccompile.serve.message_fields import CallArguments, CalledFunction, Content, Message, OpenFields, ToolCall


class InputMessage(OpenFields):
    """A message, possibly from the ``output`` of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class FunctionCall(OpenFields):
    """A call from the ``output`` of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: CallArguments = Field(default_factory=dict)


class FunctionCallOutput(OpenFields):
    """The result of the call ``call_id``."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class _ReasoningText(OpenFields):
    text: str


class ReasoningItem(OpenFields):
    """Reasoning before an answer. Only the server that wrote an encrypted one can read it."""

    type: Literal["reasoning"]
    summary: list[_ReasoningText] = Field(default_factory=list)
    content: list[_ReasoningText] = Field(default_factory=list)

    @property
    def text(self) -> str:
        """Text of the item, or else its summary."""
        return "\n".join(part.text for part in self.content or self.summary)


def _kind(value: Any) -> str:
    """``type`` of an item. It is optional for messages."""
    kind = value.get("type") if isinstance(value, dict) else ""
    return "message" if kind is None else kind if isinstance(kind, str) else ""


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="it must be an object of type message, function_call, function_call_output or reasoning",
    ),
]


def messages_of(instructions: str | None, items: Sequence[InputItem]) -> list[Message]:
    """Build the conversation. The reasoning, text and calls of one answer form one message."""
    messages = [] if instructions is None else [Message(role="system", content=instructions)]
    reasoning: str | None = None
    for item in items:
        if isinstance(item, ReasoningItem):
            reasoning = _joined("\n", reasoning, item.text)
            continue
        if isinstance(item, FunctionCall):
            _add_call(messages, item, reasoning)
        elif isinstance(item, FunctionCallOutput):
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=item.output))
        elif item.role == "assistant":
            messages.append(Message(role="assistant", content=item.content, reasoning_content=reasoning))
        elif item.role != "user" and len(messages) == 1 and messages[0].role == "system":
            # Templates have at most one system message, which is the first.
            messages[0].content = _joined("\n\n", messages[0].content, item.content) or ""
        else:
            role: Literal["user", "system"] = "user" if item.role == "user" else "system"
            messages.append(Message(role=role, content=item.content))
        reasoning = None
    return messages


def _add_call(messages: list[Message], item: FunctionCall, reasoning: str | None) -> None:
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant"))
    message = messages[-1]
    message.reasoning_content = _joined("\n", message.reasoning_content, reasoning)
    function = CalledFunction(name=item.name, arguments=item.arguments)
    message.tool_calls = [*(message.tool_calls or ()), ToolCall(id=item.call_id, function=function)]


def _joined(separator: str, *texts: str | None) -> str | None:
    return separator.join(filter(None, texts)) or None
