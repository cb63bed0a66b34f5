"""Endpoint ``/v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall
from starlette.responses import Response

from speccompile.serve.continuation import Continuation, Piece
from speccompile.serve.disconnect import EventStream
from speccompile.serve.fields import ChatBody
from speccompile.serve.logprobs import chat_logprobs
from speccompile.serve.prompts import ChatPrompt, chat_prompt
from speccompile.serve.service import OutputOptions, Prompt, Service
from speccompile.serve.streams import DONE, as_json, event, merged, with_errors
from speccompile.serve.structure import guide_of
from speccompile.serve.token_sources import token_sources
from speccompile.serve.tool_grammar import ToolGrammar
from speccompile.serve.tool_reader import CallReader, Item
from speccompile.serve.tools import Calls, grammar_of
from speccompile.serve.usage import speculation_of, usage_of


async def chat(service: Service, body: ChatBody) -> Response:
    """Generate the response to ``body``.

    Raises:
        ApiError: the request is not valid, or fails.
    """
    service.check_model(body.model)
    shown = None if body.tool_choice == "none" else body.tools
    service.check_conversation(body.messages, shown, body)
    read = service.tokenizer, service.images, body.messages, shown, body
    prompt: ChatPrompt = await service.in_thread(chat_prompt, *read)
    grammar = await service.in_thread(grammar_of, body, service.tokenizer)
    guide, guide_field = await guide_of(service, body, grammar)
    outputs = OutputOptions(
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        guide=guide,
        guide_field=guide_field,
    )
    continuations = await service.start([Prompt(prompt.ids, "messages", prompt.inputs)], body, outputs)
    answer = _ChatAnswer(service, body, grammar, continuations)
    return EventStream(with_errors(answer.stream())) if body.stream else await answer.whole()


@dataclass
class _Choice:
    """State of one choice while it is generated."""

    reader: CallReader | None
    text: str = ""
    calls: Calls = field(default_factory=Calls)
    finish_reason: str = ""
    begun: bool = False
    new_tokens: int = 0

    def read(self, piece: Piece) -> tuple[str, list[ChoiceDeltaToolCall]]:
        """Convert ``piece`` to the new text and the new parts of calls."""
        self.new_tokens = piece.tokens.stop
        if self.reader is None:
            found: list[Item] = [piece.text]
        else:
            found = self.reader.add(piece.text)
            if piece.finish_reason is not None:
                found += self.reader.end(cut=piece.finish_reason == "length")
        text = "".join(item for item in found if isinstance(item, str))
        self.text += text
        calls = self.calls.add(found)
        if piece.finish_reason is not None:
            called = self.calls.complete and piece.finish_reason == "stop"
            self.finish_reason = "tool_calls" if called else piece.finish_reason
        return text, calls


class _ChatAnswer:
    """State of one response while it is generated."""

    def __init__(
        self, service: Service, body: ChatBody, grammar: ToolGrammar | None, continuations: Sequence[Continuation]
    ) -> None:
        self._service = service
        self._body = body
        self._continuations = continuations
        self._choices = [_Choice(None if grammar is None else CallReader(grammar)) for _ in continuations]
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.model_of(body.model),
        }

    async def whole(self) -> JSONResponse:
        async for continuation, piece in merged(self._continuations):
            self._read(continuation, piece)
        # Many choices with log-probabilities have megabytes.
        response: JSONResponse = await self._service.in_thread(self._response)
        return response

    def _response(self) -> JSONResponse:
        choices = [self._whole_choice(*pair) for pair in zip(self._continuations, self._choices, strict=True)]
        completion = ChatCompletion.model_construct(
            **self._head, object="chat.completion", choices=choices, usage=self._usage()
        )
        return JSONResponse(as_json(completion) | {"metrics": self._metrics()})

    async def stream(self) -> AsyncGenerator[str, None]:
        options = self._body.stream_options
        async for continuation, piece in merged(self._continuations):
            choice = self._choices[continuation.index]
            if not choice.begun:
                choice.begun = True
                yield self._chunk(continuation, ChoiceDelta(role="assistant", content=""))
            text, calls = self._read(continuation, piece)
            if text or (piece.tokens and (self._body.logprobs or self._body.return_token_sources)):
                yield self._chunk(continuation, ChoiceDelta(content=text), piece.tokens)
            if calls:
                yield self._chunk(continuation, ChoiceDelta(tool_calls=calls))
            if choice.finish_reason:
                yield self._chunk(continuation, ChoiceDelta(), reason=choice.finish_reason)
        if options is not None and options.include_usage:
            last = ChatCompletionChunk.model_construct(
                **self._head, object="chat.completion.chunk", choices=[], usage=self._usage()
            )
            yield event(as_json(last) | {"metrics": self._metrics()})
        yield DONE

    def _read(self, continuation: Continuation, piece: Piece) -> tuple[str, list[ChoiceDeltaToolCall]]:
        return self._choices[continuation.index].read(piece)

    def _whole_choice(self, continuation: Continuation, choice: _Choice) -> Choice:
        calls = [call.whole() for call in choice.calls]
        is_call = bool(calls) or (choice.reader is not None and choice.reader.grammar.required)
        message: dict[str, Any] = {"role": "assistant", "content": choice.text or (None if is_call else "")}
        if calls:
            message["tool_calls"] = calls
        positions = range(len(continuation.request.new_tokens))
        return Choice.model_construct(
            index=continuation.index,
            message=ChatCompletionMessage.model_construct(**message),
            finish_reason=choice.finish_reason,
            logprobs=self._logprobs(continuation, positions),
            **self._sources(continuation, positions),
        )

    def _chunk(
        self,
        continuation: Continuation,
        delta: ChoiceDelta,
        positions: range = range(0),
        reason: str | None = None,
    ) -> str:
        choice = ChunkChoice.model_construct(
            index=continuation.index,
            delta=delta,
            finish_reason=reason,
            logprobs=self._logprobs(continuation, positions),
            **self._sources(continuation, positions),
        )
        chunk = ChatCompletionChunk.model_construct(
            **self._head, object="chat.completion.chunk", choices=[choice], usage=self._usage_so_far()
        )
        return event(chunk)

    def _logprobs(self, continuation: Continuation, positions: range) -> ChoiceLogprobs | None:
        if not self._body.logprobs or not positions:
            return None
        content = chat_logprobs(continuation.logprobs(positions), self._service.vocabulary)
        return ChoiceLogprobs(content=content, refusal=None)

    def _sources(self, continuation: Continuation, positions: range) -> dict[str, Any]:
        if not self._body.return_token_sources or not positions:
            return {}
        return {"token_sources": token_sources(self._service, continuation.request, positions)}

    def _usage(self) -> Any:
        requests = [item.request for item in self._continuations]
        new = [choice.new_tokens for choice in self._choices]
        return usage_of(requests, new, self._body.n, predicted_by=self._service.predicted_by(self._body))

    def _usage_so_far(self) -> Any:
        options = self._body.stream_options
        return self._usage() if options is not None and options.continuous_usage_stats else None

    def _metrics(self) -> dict[str, Any]:
        return speculation_of([item.request for item in self._continuations])
