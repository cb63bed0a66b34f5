"""Endpoint ``/v1/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi.responses import JSONResponse
from openai.types.completion import Completion
from openai.types.completion_choice import CompletionChoice, Logprobs
from starlette.responses import Response

from speccompile.runtime.detokenizer import Detokenizer
from speccompile.serve.continuation import Continuation
from speccompile.serve.disconnect import EventStream
from speccompile.serve.fields import CompletionBody
from speccompile.serve.infill import InfillForm, check_infill_ids, infill_ends, infill_form, infill_prompt
from speccompile.serve.logprobs import TextOffsets, completion_logprobs
from speccompile.serve.prompts import Echo, echo_of, text_ids
from speccompile.serve.service import OutputOptions, Prompt, Service
from speccompile.serve.streams import DONE, as_json, event, merged, with_errors
from speccompile.serve.structure import compiled, source_of
from speccompile.serve.token_sources import token_sources
from speccompile.serve.usage import speculation_of, usage_of


async def complete(service: Service, body: CompletionBody) -> Response:
    """Generate the response to ``body``.

    Raises:
        ApiError: the request is not valid, or fails.
    """
    service.check_model(body.model)
    service.check_choices(len(body.prompt), body)
    form = infill_form(service.tokenizer) if body.suffix else None
    # One call per prompt: other clients' prompts run in between, and the rest is skipped if the client leaves.
    prompts = [await service.in_thread(_prompt, service, body, form, index) for index in range(len(body.prompt))]
    source = await service.in_thread(source_of, body)
    guide = None if source is None else await compiled(service, *source)
    outputs = OutputOptions(
        # To read a prompt the engine must generate at least one token.
        max_new_tokens=None if body.max_tokens is None else max(1, body.max_tokens),
        logprobs=body.logprobs is not None,
        prompt_logprobs=body.echo and body.logprobs is not None,
        top_logprobs=body.logprobs or 0,
        guide=guide,
        guide_field=None if source is None else source[1],
        end_tokens=() if form is None else infill_ends(service.tokenizer, form),
    )
    continuations = await service.start(prompts, body, outputs)
    try:
        echoes = await service.in_thread(_echoes, service, body, prompts) if body.echo else []
    except BaseException:
        for continuation in continuations:
            continuation.request.cancel()
        raise
    answer = _CompletionAnswer(service, body, continuations, echoes)
    return EventStream(with_errors(answer.stream())) if body.stream else await answer.whole()


def _prompt(service: Service, body: CompletionBody, form: InfillForm | None, index: int) -> Prompt:
    prompt, field = body.prompt[index], "prompt" if len(body.prompt) == 1 else f"prompt[{index}]"
    if not isinstance(prompt, str):
        return Prompt(prompt, field)
    text = prompt if form is None else infill_prompt(form, prompt, body.suffix)
    service.check_text(text, field)
    ids = text_ids(service.tokenizer, text, special=body.add_special_tokens)
    if form is not None:
        check_infill_ids(service.tokenizer, form, ids)
    return Prompt(ids, field)


def _echoes(service: Service, body: CompletionBody, prompts: Sequence[Prompt]) -> list[Echo]:
    return [
        echo_of(service.tokenizer, service.vocabulary, given, prompt.ids, special=body.add_special_tokens)
        for given, prompt in zip(body.prompt, prompts, strict=True)
    ]


class _CompletionAnswer:
    """State of one response while it is generated.

    Args:
        echoes: one for each prompt; empty without ``echo``.
    """

    def __init__(
        self, service: Service, body: CompletionBody, continuations: Sequence[Continuation], echoes: Sequence[Echo]
    ) -> None:
        self._service = service
        self._body = body
        self._continuations = continuations
        self._head: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.model_of(body.model),
            "object": "text_completion",
        }
        self._echoes = [echo for echo in echoes for _ in range(body.n)]
        self._offsets = [
            TextOffsets(
                service.vocabulary,
                Detokenizer(service.tokenizer, item.request.prompt, skip_special_tokens=body.skip_special_tokens),
                len(self._echo(item)),
            )
            for item in continuations
        ]
        #: Numbers of new tokens that the client has received.
        self._new_tokens = [0] * len(continuations)

    async def whole(self) -> JSONResponse:
        count = len(self._continuations)
        texts, reasons = [self._echo(item) for item in self._continuations], [""] * count
        async for continuation, piece in merged(self._continuations):
            if self._body.max_tokens != 0:
                texts[continuation.index] += piece.text
                self._new_tokens[continuation.index] = piece.tokens.stop
            reasons[continuation.index] = piece.finish_reason or reasons[continuation.index]
        # Many choices with log-probabilities have megabytes.
        response: JSONResponse = await self._service.in_thread(self._response, texts, reasons)
        return response

    def _response(self, texts: Sequence[str], reasons: Sequence[str]) -> JSONResponse:
        choices = []
        for continuation, text, reason in zip(self._continuations, texts, reasons, strict=True):
            positions = range(self._new_tokens[continuation.index])
            choices.append(self._choice(continuation, text, reason, positions, is_first=True))
        completion = Completion.model_construct(**self._head, choices=choices, usage=self._usage())
        return JSONResponse(as_json(completion) | {"metrics": self._metrics()})

    async def stream(self) -> AsyncGenerator[str, None]:
        options = self._body.stream_options
        begun: set[int] = set()
        async for continuation, piece in merged(self._continuations):
            is_first = continuation.index not in begun
            text, positions = (piece.text, piece.tokens) if self._body.max_tokens != 0 else ("", range(0))
            self._new_tokens[continuation.index] = positions.stop
            if is_first:
                text = self._echo(continuation) + text
                begun.add(continuation.index)
            reason = piece.finish_reason
            if not (text or positions or reason):
                continue
            choice = self._choice(continuation, text, reason, positions, is_first=is_first)
            so_far = self._usage() if options is not None and options.continuous_usage_stats else None
            yield event(Completion.model_construct(**self._head, choices=[choice], usage=so_far))
        if options is not None and options.include_usage:
            last = Completion.model_construct(**self._head, choices=[], usage=self._usage())
            yield event(as_json(last) | {"metrics": self._metrics()})
        yield DONE

    def _choice(
        self, continuation: Continuation, text: str, reason: str | None, positions: range, *, is_first: bool
    ) -> CompletionChoice:
        extra: dict[str, Any] = {}
        if self._body.return_token_sources:
            extra["token_sources"] = token_sources(self._service, continuation.request, positions)
        return CompletionChoice.model_construct(
            index=continuation.index,
            text=text,
            finish_reason=reason,
            logprobs=self._logprobs_of(continuation, positions, is_first=is_first),
            **extra,
        )

    def _logprobs_of(self, continuation: Continuation, positions: range, *, is_first: bool) -> Logprobs | None:
        if self._body.logprobs is None:
            return None
        entries = continuation.logprobs(positions)
        offsets = self._offsets[continuation.index].add([entry.token for entry in entries])
        texts = [self._service.vocabulary.text_of(entry.token) for entry in entries]
        if self._echoes and is_first:
            echo = self._echoes[continuation.index]
            entries = continuation.prompt_logprobs() + entries
            offsets, texts = echo.offsets + offsets, echo.tokens + texts
        return completion_logprobs(entries, texts, offsets, self._service.vocabulary, self._body.logprobs)

    def _echo(self, continuation: Continuation) -> str:
        return self._echoes[continuation.index].text if self._echoes else ""

    def _usage(self) -> Any:
        requests = [item.request for item in self._continuations]
        predicted_by = self._service.predicted_by(self._body)
        return usage_of(requests, self._new_tokens, self._body.n, predicted_by=predicted_by)

    def _metrics(self) -> dict[str, Any]:
        return speculation_of([item.request for item in self._continuations])
