"""``/v1/responses``, for texts. Nothing is stored, so a conversation is sent as a whole each time."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi.responses import JSONResponse
from openai.types.responses import (
    Response as OpenAIResponse,
)
from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseCreatedEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
    ResponseUsage,
)
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel
from starlette.responses import Response

from speccompile.serve.api_error import ApiError
from speccompile.serve.continuation import Continuation
from speccompile.serve.disconnect import EventStream
from speccompile.serve.prompts import chat_ids
from speccompile.serve.responses_fields import ResponsesBody
from speccompile.serve.service import OutputOptions, Prompt, Service
from speccompile.serve.streams import as_json, event, merged, with_errors
from speccompile.serve.structure import compiled, source_of
from speccompile.serve.usage import speculation_of

#: Fields of this endpoint, by those of chats.
_FIELDS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}


async def respond(service: Service, body: ResponsesBody) -> Response:
    """The response to ``body``.

    Raises:
        ApiError: it cannot be followed.
    """
    chat = await service.in_thread(body.as_chat)
    service.check_model(chat.model)
    try:
        service.check_conversation(chat.messages, None)
        ids = await service.in_thread(chat_ids, service.tokenizer, chat.messages, None, generation_prompt=True)
        source = await service.in_thread(source_of, chat)
        outputs = OutputOptions(
            max_new_tokens=chat.max_completion_tokens,
            guide=None if source is None else await compiled(service, *source),
            guide_field=None if source is None else source[1],
        )
        (continuation,) = await service.start([Prompt(ids, "messages")], chat, outputs)
    except ApiError as error:
        raise _renamed(error) from None
    answer = _Answer(service, body, continuation)
    return EventStream(with_errors(answer.stream())) if body.stream else await answer.whole()


def _renamed(error: ApiError) -> ApiError:
    """``error`` with the field as this endpoint calls it."""
    name = _FIELDS.get(error.param or "")
    if name is None:
        return error
    message = error.message.replace(str(error.param), name, 1)
    return ApiError(message, status=error.status, param=name, code=error.code)


class _Answer:
    """One response, in the making."""

    def __init__(self, service: Service, body: ResponsesBody, continuation: Continuation) -> None:
        self._service = service
        self._body = body
        self._continuation = continuation
        self._text = ""
        self._reason = ""
        self._events = 0
        self._id, self._item = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created = time.time()

    async def whole(self) -> JSONResponse:
        async for _ in self._pieces():
            pass
        return JSONResponse(as_json(self._response()) | {"metrics": self._metrics()})

    async def stream(self) -> AsyncGenerator[str, None]:
        message = self._message("in_progress", [])
        part = {"item_id": self._item, "output_index": 0, "content_index": 0}
        empty = ResponseOutputText(type="output_text", text="", annotations=[])
        yield self._event(ResponseCreatedEvent, "response.created", response=self._response())
        yield self._event(ResponseInProgressEvent, "response.in_progress", response=self._response())
        yield self._event(ResponseOutputItemAddedEvent, "response.output_item.added", output_index=0, item=message)
        yield self._event(ResponseContentPartAddedEvent, "response.content_part.added", part=empty, **part)
        async for text in self._pieces():
            if text:
                delta = {"delta": text, "logprobs": [], **part}
                yield self._event(ResponseTextDeltaEvent, "response.output_text.delta", **delta)
        response = self._response()
        (message,) = response.output
        done = {"text": self._text, "logprobs": [], **part}
        yield self._event(ResponseTextDoneEvent, "response.output_text.done", **done)
        yield self._event(ResponseContentPartDoneEvent, "response.content_part.done", part=message.content[0], **part)
        yield self._event(ResponseOutputItemDoneEvent, "response.output_item.done", output_index=0, item=message)
        complete = response.status == "completed"
        kind: type[BaseModel] = ResponseCompletedEvent if complete else ResponseIncompleteEvent
        yield self._event(kind, f"response.{response.status}", response=response)

    async def _pieces(self) -> AsyncGenerator[str, None]:
        async for _, piece in merged([self._continuation]):
            self._text += piece.text
            if piece.finish_reason is not None:
                self._reason = piece.finish_reason
            yield piece.text

    def _event(self, kind: type[BaseModel], name: str, **fields: Any) -> str:
        data = kind.model_construct(type=name, sequence_number=self._events, **fields)
        self._events += 1
        return f"event: {name}\n{event(data)}"

    def _message(self, status: str, content: list[ResponseOutputText]) -> Any:
        fields: dict[str, Any] = {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }
        return ResponseOutputMessage.model_construct(**fields)

    def _response(self) -> Any:
        """As it is now: without output until the text has ended."""
        status = {"": "in_progress", "stop": "completed"}.get(self._reason, "incomplete")
        text = ResponseOutputText(type="output_text", text=self._text, annotations=[])
        return OpenAIResponse.model_construct(
            id=self._id,
            object="response",
            created_at=self._created,
            status=status,
            error=None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None,
            instructions=self._body.instructions,
            max_output_tokens=self._body.max_output_tokens,
            model=self._service.model_of(self._body.model),
            output=[self._message(status, [text])] if self._reason else [],
            parallel_tool_calls=True,
            temperature=self._body.temperature,
            top_p=self._body.top_p,
            tool_choice="auto",
            tools=[],
            usage=self._usage() if self._reason else None,
        )

    def _usage(self) -> ResponseUsage:
        request = self._continuation.request
        prompt, new = len(request.prompt), len(request.new_tokens)
        return ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=request.stats.reused_tokens, cache_write_tokens=0),
            output_tokens=new,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            total_tokens=prompt + new,
        )

    def _metrics(self) -> dict[str, Any]:
        return speculation_of([self._continuation.request])
