"""Endpoint ``/v1/responses``, for texts and function calls. The server stores nothing, so each request has the whole
conversation."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi.responses import JSONResponse
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob
from openai.types.responses import (
    FunctionTool,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseUsage,
)
from openai.types.responses import (
    Response as OpenAIResponse,
)
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel
from starlette.responses import Response

from speccompile.serve.api_error import ApiError
from speccompile.serve.continuation import Continuation, Piece
from speccompile.serve.disconnect import EventStream
from speccompile.serve.logprobs import chat_logprobs
from speccompile.serve.prompts import chat_ids
from speccompile.serve.responses_fields import ResponsesBody
from speccompile.serve.responses_output import Event, Output
from speccompile.serve.service import OutputOptions, Prompt, Service
from speccompile.serve.streams import as_json, event, merged, with_errors
from speccompile.serve.structure import guide_of
from speccompile.serve.tool_reader import CallReader, Item
from speccompile.serve.tools import grammar_of
from speccompile.serve.usage import speculation_of

#: Fields of this endpoint, by those of chats.
_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
}


async def respond(service: Service, body: ResponsesBody) -> Response:
    """Generate the response to ``body``.

    Raises:
        ApiError: the request is not valid, or fails.
    """
    chat = await service.in_thread(body.as_chat)
    service.check_model(chat.model)
    shown = None if chat.tool_choice == "none" else chat.tools
    try:
        service.check_conversation(chat.messages, shown, chat)
        ids = await service.in_thread(chat_ids, service.tokenizer, chat.messages, shown, chat)
        grammar = await service.in_thread(grammar_of, chat, service.tokenizer)
        guide, guide_field = await guide_of(service, chat, grammar)
        outputs = OutputOptions(
            max_new_tokens=chat.max_completion_tokens,
            logprobs=chat.logprobs,
            top_logprobs=chat.top_logprobs,
            guide=guide,
            guide_field=None if guide_field is None else _FIELDS.get(guide_field, guide_field),
        )
        (continuation,) = await service.start([Prompt(ids, "messages")], chat, outputs)
    except ApiError as error:
        raise _renamed(error, list(body.functions)) from None
    answer = _ResponseAnswer(service, body, None if grammar is None else CallReader(grammar), continuation)
    return EventStream(with_errors(answer.stream())) if body.stream else await answer.whole()


def _renamed(error: ApiError, indices: Sequence[int]) -> ApiError:
    """Convert the field of ``error`` from the name in chats to that of this endpoint.

    Args:
        indices: index in the response's tools of each tool of the chat.
    """
    param = error.param or ""
    name = _FIELDS.get(param, param)
    if name.startswith("tool_choice."):
        name = re.sub(r"\.(function|allowed_tools)\b", "", name)
    elif found := re.match(r"tools\[(\d+)\]", name):
        name = f"tools[{indices[int(found[1])]}]{name[found.end() :].removeprefix('.function')}"
    if name == param:
        return error
    return ApiError(error.message.replace(param, name, 1), status=error.status, param=name, code=error.code)


class _ResponseAnswer:
    """State of one response while it is generated."""

    def __init__(
        self, service: Service, body: ResponsesBody, reader: CallReader | None, continuation: Continuation
    ) -> None:
        self._service = service
        self._body = body
        self._reader = reader
        self._continuation = continuation
        self._output = Output()
        self._status = "in_progress"
        self._events = 0
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = time.time()

    async def whole(self) -> JSONResponse:
        async for _ in self._written():
            pass
        # Log-probabilities of a whole answer have megabytes.
        response: JSONResponse = await self._service.in_thread(self._whole)
        return response

    def _whole(self) -> JSONResponse:
        return JSONResponse(as_json(self._response()) | {"metrics": self._metrics()})

    async def stream(self) -> AsyncGenerator[str, None]:
        yield self._event(ResponseCreatedEvent, "created", {"response": self._response()})
        yield self._event(ResponseInProgressEvent, "in_progress", {"response": self._response()})
        async for item in self._written():
            yield await self._event_of_part(item)
        last: type[BaseModel] = ResponseCompletedEvent if self._status == "completed" else ResponseIncompleteEvent
        yield await self._event_of_part((last, self._status, {"response": self._response()}))

    async def _written(self) -> AsyncGenerator[Event, None]:
        """Yield the events of the output, which is complete afterwards."""
        async for _, piece in merged([self._continuation]):
            logprobs = self._logprobs(piece)
            found: list[Item] = [piece.text] if piece.text or logprobs else []
            if self._reader is not None:
                found = self._reader.add(piece.text)
                if piece.finish_reason is not None:
                    found += self._reader.end(cut=piece.finish_reason == "length")
            for item in self._output.add(found, logprobs):
                yield item
            if piece.finish_reason is not None:
                self._status = "completed" if piece.finish_reason == "stop" else "incomplete"
                for item in self._output.end(self._status):
                    yield item

    def _logprobs(self, piece: Piece) -> list[ChatCompletionTokenLogprob]:
        if not self._body.logprobs:
            return []
        return chat_logprobs(self._continuation.logprobs(piece.tokens), self._service.vocabulary)

    async def _event_of_part(self, item: Event) -> str:
        """Format an event. The last events have all log-probabilities."""
        if not self._body.logprobs:
            return self._event(*item)
        shown: str = await self._service.in_thread(self._event, *item)
        return shown

    def _event(self, kind: type[BaseModel], name: str, fields: dict[str, Any]) -> str:
        data = kind.model_construct(type=f"response.{name}", sequence_number=self._events, **fields)
        self._events += 1
        return f"event: response.{name}\n{event(data)}"

    def _response(self) -> Any:
        """The response at this time. It has no output until the text has ended."""
        body, has_ended = self._body, self._status != "in_progress"
        incomplete = IncompleteDetails(reason="max_output_tokens") if self._status == "incomplete" else None
        fields = {"name", "description", "parameters", "strict"}
        tools = [tool.model_dump(include=fields) for tool in body.functions.values()]
        return OpenAIResponse.model_construct(
            id=self._id,
            object="response",
            created_at=self._created,
            status=self._status,
            error=None,
            incomplete_details=incomplete,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._service.model_of(body.model),
            output=self._output.items() if has_ended else [],
            parallel_tool_calls=body.parallel_tool_calls,
            temperature=body.temperature,
            top_p=body.top_p,
            top_logprobs=body.top_logprobs,
            tool_choice=body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
            tools=[FunctionTool.model_construct(type="function", **tool) for tool in tools],
            usage=self._usage() if has_ended else None,
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
