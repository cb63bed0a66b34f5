"""Output items of one answer of ``/v1/responses`` while they are generated, and their events in a stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob
from openai.types.responses import (
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseFunctionCallArgumentsDoneEvent,
    ResponseFunctionToolCall,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)
from pydantic import BaseModel

from speccompile.serve.tool_reader import Arguments, CallBegin, Item
from speccompile.serve.tools import new_call_id

#: Event: its type, its name, and its fields without its number in the stream.
Event = tuple[type[BaseModel], str, dict[str, Any]]


class TextItem:
    """A message with one text."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._id = f"msg_{uuid.uuid4().hex}"
        self._text = ""
        self._logprobs: list[ChatCompletionTokenLogprob] = []

    def begin(self) -> Iterator[Event]:
        """Events at the beginning of the item."""
        message = self.whole("in_progress")
        message.content = []
        yield ResponseOutputItemAddedEvent, "output_item.added", {"output_index": self._index, "item": message}
        yield ResponseContentPartAddedEvent, "content_part.added", {"part": self._part(), **self._position}

    def add(self, text: str, logprobs: Sequence[ChatCompletionTokenLogprob] = ()) -> Iterator[Event]:
        """Event for more text, whose tokens have ``logprobs``."""
        self._text += text
        self._logprobs += logprobs
        yield ResponseTextDeltaEvent, "output_text.delta", {"delta": text, "logprobs": list(logprobs), **self._position}

    def end(self, status: str) -> Iterator[Event]:
        """Events at the end of the item."""
        done = {"text": self._text, "logprobs": self._logprobs, **self._position}
        yield ResponseTextDoneEvent, "output_text.done", done
        yield ResponseContentPartDoneEvent, "content_part.done", {"part": self._part(), **self._position}
        item = {"output_index": self._index, "item": self.whole(status)}
        yield ResponseOutputItemDoneEvent, "output_item.done", item

    def whole(self, status: str) -> ResponseOutputMessage:
        """The item at this time."""
        fields: dict[str, Any] = {"role": "assistant", "status": status, "content": [self._part()]}
        return ResponseOutputMessage.model_construct(id=self._id, type="message", **fields)

    def _part(self) -> ResponseOutputText:
        # Log-probabilities of chats have the same fields.
        return ResponseOutputText.model_construct(
            type="output_text", text=self._text, annotations=[], logprobs=list(self._logprobs)
        )

    @property
    def _position(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._index, "content_index": 0}


class CallItem:
    """A call of the function ``name``."""

    def __init__(self, index: int, name: str) -> None:
        self._index = index
        self._name = name
        self._id, self._call_id = f"fc_{uuid.uuid4().hex}", new_call_id()
        self._arguments = ""

    def begin(self) -> Iterator[Event]:
        """Event at the beginning of the item."""
        item = {"output_index": self._index, "item": self.whole("in_progress")}
        yield ResponseOutputItemAddedEvent, "output_item.added", item

    def add(self, text: str) -> Iterator[Event]:
        """Event for more arguments."""
        self._arguments += text
        delta = {"delta": text, **self._position}
        yield ResponseFunctionCallArgumentsDeltaEvent, "function_call_arguments.delta", delta

    def end(self, status: str) -> Iterator[Event]:
        """Events at the end of the item."""
        done = {"name": self._name, "arguments": self._arguments, **self._position}
        yield ResponseFunctionCallArgumentsDoneEvent, "function_call_arguments.done", done
        item = {"output_index": self._index, "item": self.whole(status)}
        yield ResponseOutputItemDoneEvent, "output_item.done", item

    def whole(self, status: str) -> ResponseFunctionToolCall:
        """The item at this time."""
        fields: dict[str, Any] = {"name": self._name, "arguments": self._arguments, "status": status}
        return ResponseFunctionToolCall.model_construct(
            id=self._id, type="function_call", call_id=self._call_id, **fields
        )

    @property
    def _position(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._index}


class Output:
    """Output items in their order. Only the last one is incomplete."""

    def __init__(self) -> None:
        self._items: list[TextItem | CallItem] = []
        self._status = "in_progress"

    def add(self, found: Sequence[Item], logprobs: Sequence[ChatCompletionTokenLogprob] = ()) -> list[Event]:
        """Events for new text and calls. An answer with log-probabilities is one text."""
        events: list[Event] = []
        for item in found:
            if isinstance(item, CallBegin):
                events += self._begin(CallItem(len(self._items), item.name))
            elif isinstance(item, Arguments):
                events += self._items[-1].add(item.text)
            else:
                events += [] if self._items else self._begin(TextItem(0))
                text = self._items[-1]
                assert isinstance(text, TextItem)
                events += text.add(item, logprobs)
        return events

    def end(self, status: str) -> list[Event]:
        """Events at the end. A completed answer has at least one item, which may be an empty message."""
        events = self._begin(TextItem(0)) if status == "completed" and not self._items else []
        self._status = status
        return [*events, *(self._items[-1].end(status) if self._items else ())]

    def items(self) -> list[Any]:
        """Items in the format of responses."""
        statuses = [*["completed"] * (len(self._items) - 1), self._status]
        return [item.whole(status) for item, status in zip(self._items, statuses, strict=False)]

    def _begin(self, item: TextItem | CallItem) -> list[Event]:
        before = self._items[-1].end("completed") if self._items else ()
        self._items.append(item)
        return [*before, *item.begin()]
