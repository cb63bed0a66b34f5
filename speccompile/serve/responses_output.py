"""The output items of one answer of ``/v1/responses`` while they are written, and the events of a stream of them."""

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

#: An event: its type, its name, and its fields without the number that it has in its stream.
Event = tuple[type[BaseModel], str, dict[str, Any]]


class TextItem:
    """A message of one text."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._id = f"msg_{uuid.uuid4().hex}"
        self._text = ""
        self._logprobs: list[ChatCompletionTokenLogprob] = []

    def begin(self) -> Iterator[Event]:
        """The events that open it."""
        message = self.whole("in_progress")
        message.content = []
        yield ResponseOutputItemAddedEvent, "output_item.added", {"output_index": self._index, "item": message}
        yield ResponseContentPartAddedEvent, "content_part.added", {"part": self._part(), **self._place}

    def add(self, text: str, logprobs: Sequence[ChatCompletionTokenLogprob] = ()) -> Iterator[Event]:
        """The event of more text, whose tokens have these log-probabilities."""
        self._text += text
        self._logprobs += logprobs
        yield ResponseTextDeltaEvent, "output_text.delta", {"delta": text, "logprobs": list(logprobs), **self._place}

    def end(self, status: str) -> Iterator[Event]:
        """The events that close it."""
        done = {"text": self._text, "logprobs": self._logprobs, **self._place}
        yield ResponseTextDoneEvent, "output_text.done", done
        yield ResponseContentPartDoneEvent, "content_part.done", {"part": self._part(), **self._place}
        item = {"output_index": self._index, "item": self.whole(status)}
        yield ResponseOutputItemDoneEvent, "output_item.done", item

    def whole(self, status: str) -> ResponseOutputMessage:
        """The item as it is now."""
        fields: dict[str, Any] = {"role": "assistant", "status": status, "content": [self._part()]}
        return ResponseOutputMessage.model_construct(id=self._id, type="message", **fields)

    def _part(self) -> ResponseOutputText:
        # Chats' log-probabilities have the same fields.
        return ResponseOutputText.model_construct(
            type="output_text", text=self._text, annotations=[], logprobs=list(self._logprobs)
        )

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._index, "content_index": 0}


class CallItem:
    """A call of the function ``name``."""

    def __init__(self, index: int, name: str) -> None:
        self._index = index
        self._name = name
        self._id, self._call_id = f"fc_{uuid.uuid4().hex}", new_call_id()
        self._arguments = ""

    def begin(self) -> Iterator[Event]:
        """The event that opens it."""
        item = {"output_index": self._index, "item": self.whole("in_progress")}
        yield ResponseOutputItemAddedEvent, "output_item.added", item

    def add(self, text: str) -> Iterator[Event]:
        """The event of more arguments."""
        self._arguments += text
        delta = {"delta": text, **self._place}
        yield ResponseFunctionCallArgumentsDeltaEvent, "function_call_arguments.delta", delta

    def end(self, status: str) -> Iterator[Event]:
        """The events that close it."""
        done = {"name": self._name, "arguments": self._arguments, **self._place}
        yield ResponseFunctionCallArgumentsDoneEvent, "function_call_arguments.done", done
        item = {"output_index": self._index, "item": self.whole(status)}
        yield ResponseOutputItemDoneEvent, "output_item.done", item

    def whole(self, status: str) -> ResponseFunctionToolCall:
        """The item as it is now."""
        fields: dict[str, Any] = {"name": self._name, "arguments": self._arguments, "status": status}
        return ResponseFunctionToolCall.model_construct(
            id=self._id, type="function_call", call_id=self._call_id, **fields
        )

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._index}


class Output:
    """Items in their order. Only the last one is still written."""

    def __init__(self) -> None:
        self._items: list[TextItem | CallItem] = []
        self._status = "in_progress"

    def add(self, found: Sequence[Item], logprobs: Sequence[ChatCompletionTokenLogprob] = ()) -> list[Event]:
        """The events of what was read. An answer with log-probabilities is one text."""
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
        """The events of the end. A completed answer has an item, if only an empty message."""
        events = self._begin(TextItem(0)) if status == "completed" and not self._items else []
        self._status = status
        return [*events, *(self._items[-1].end(status) if self._items else ())]

    def items(self) -> list[Any]:
        """The items as responses have them."""
        statuses = [*["completed"] * (len(self._items) - 1), self._status]
        return [item.whole(status) for item, status in zip(self._items, statuses, strict=False)]

    def _begin(self, item: TextItem | CallItem) -> list[Event]:
        before = self._items[-1].end("completed") if self._items else ()
        self._items.append(item)
        return [*before, *item.begin()]
