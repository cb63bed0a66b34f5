"""Shared parts of all endpoints: the served model, its tokenizer, and submission of requests to the engine."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from speccompile import Speculator
from speccompile.errors import shown
from speccompile.guides import Guide
from speccompile.modes.prediction import Prediction
from speccompile.multimodal.inputs import Features
from speccompile.runtime.engine import Engine
from speccompile.runtime.request import Request
from speccompile.serve.api_error import ApiError, engine_error
from speccompile.serve.continuation import Continuation
from speccompile.serve.counts import Counts
from speccompile.serve.fields import GenerationFields, Message
from speccompile.serve.guide_compiler import GuideCompiler
from speccompile.serve.image_parts import ImageReader
from speccompile.serve.learned_head import close_head, open_head
from speccompile.serve.memory_file import close_memory, open_memory
from speccompile.serve.options import ServeOptions
from speccompile.serve.prompts import text_ids
from speccompile.serve.request_log import current
from speccompile.serve.sampling import eos_arguments, sampling_arguments, seed_of
from speccompile.serve.template_fields import TemplateFields
from speccompile.serve.text import AnswerText, StopTexts
from speccompile.serve.tool_fields import Tool
from speccompile.serve.vocabulary import Vocabulary

log = logging.getLogger("speccompile.serve")

#: Number of consecutive failed steps after which the engine is reported as dead.
_MOST_FAILURES = 3
#: Number of threads that build prompts and submit. A submit may build executables, and other requests must not wait.
_THREADS = 8


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the request's field that they come from. ``inputs`` are what its images are for the model's
    forward, by name."""

    ids: list[int]
    field: str
    inputs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class OutputOptions:
    """Outputs and limits of a request, apart from its sampling parameters.

    Args:
        max_new_tokens: None is the number that fits.
        logprobs, prompt_logprobs: whether to record log-probabilities.
        top_logprobs: number of likeliest tokens to record.
        guide: structure of the text; ``guide_field`` is the field that it comes from.
        end_tokens: tokens that end the text, in addition to those of the model and of the request.
    """

    max_new_tokens: int | None
    logprobs: bool = False
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    guide: Guide | None = None
    guide_field: str | None = None
    end_tokens: Sequence[int] = ()


@dataclass
class Service:
    """A speculator that is served under a name. ``processor`` is that of a model that reads images."""

    spec: Speculator
    tokenizer: PreTrainedTokenizerBase
    name: str
    options: ServeOptions
    processor: ProcessorMixin | None = None

    def __post_init__(self) -> None:
        if self.options.memory is not None:
            open_memory(self.spec, self.options.memory)
        if self.options.learn is not None:
            open_head(self.spec, self.options.learn)
        self.counts = Counts(self.labels)
        self.vocabulary = Vocabulary(self.tokenizer)
        self.guides = GuideCompiler(self.tokenizer, self.options)
        #: Whether the server is shutting down, which ends all requests.
        self.ends = False
        processor, options = self.processor, self.options
        #: Reads images of messages; None if the model has no processor.
        self.images = None if processor is None else ImageReader(processor, options.image_urls, options.max_body_bytes)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="speccompile-serve")
        queue = self.engine.waiting
        queue.client_limit = max(1, queue.limit * self.options.max_client_share // 100)

    @property
    def labels(self) -> dict[str, str]:
        """vLLM's labels of all metrics under its names."""
        return {"model_name": self.name, "engine": "0"}

    @property
    def engine(self) -> Engine:
        """The engine that runs all requests."""
        return self.spec.engine

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters."""
        return self.spec.mode.drafter_names

    @property
    def max_len(self) -> int:
        """Largest number of tokens of a sequence."""
        return self.engine.arena.layout.max_len

    @property
    def is_alive(self) -> bool:
        """Whether the engine is open, and fewer than the last three steps failed."""
        return not self.engine.closed and self.engine.failures < _MOST_FAILURES

    def end_requests(self) -> None:
        """Cancel all requests, and accept no more. Clients receive status 503, or an error event."""
        self.ends = True
        self.engine.close()

    def close(self) -> None:
        """Cancel all requests, and end threads and processes. Running calls in threads are not awaited."""
        self.ends = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.guides.close()
        try:
            if self.options.memory is not None and not self.spec.closed:
                close_memory(self.spec, self.options.memory)
            if self.options.learn is not None and not self.spec.closed:
                close_head(self.spec, self.options.learn)
        finally:
            self.spec.close()

    @property
    def models(self) -> tuple[str, ...]:
        """Valid values of a request's ``model``: the name of the model, and those of its adapters."""
        return (self.name, *(name for name in self.spec.adapters if name != self.name))

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if ``name`` is neither this model nor one of its adapters."""
        if name is not None and name not in self.models:
            names = ", ".join(map(repr, self.models))
            message = f"model: the model {shown(name)} does not exist; this server has {names}"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    def model_of(self, name: str | None) -> str:
        """Name of the model that answers a request with this ``model``."""
        return self.name if name is None else name

    def predicted_by(self, body: GenerationFields) -> int | None:
        """Index in :attr:`drafters` of the drafter of the request's predicted text; None without such a text."""
        return None if body.prediction is None else self.drafters.index(Prediction.name)

    @functools.cached_property
    def _most_characters(self) -> int:
        """Upper bound of the characters that fit into a sequence, if all tokens were the longest one."""
        return self.max_len * max(map(len, self.tokenizer.get_vocab()))

    def check_text(self, text: str, param: str) -> None:
        """Raise ApiError if ``text``, of the field ``param``, cannot fit into a sequence. To tokenize megabytes would
        need seconds and gigabytes."""
        self._check_characters(len(text), param)

    def check_conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, given: TemplateFields
    ) -> None:
        """Raise ApiError if the input of the chat template cannot fit into a sequence."""
        if len(messages) > self.max_len:
            raise self._too_long(f"{len(messages)} messages", "messages")
        for items, param in ((messages, "messages"), (tools or (), "tools")):
            self._check_characters(sum(_characters(item.model_dump(exclude_none=True)) for item in items), param)
        self._check_characters(_characters(given.chat_template_kwargs), "chat_template_kwargs")

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise ApiError if ``tokens``, of the field ``param``, do not fit into a sequence."""
        if len(tokens) > self.max_len:
            raise self._too_long(f"{len(tokens)} tokens", param)

    def check_choices(self, prompts: int, body: GenerationFields) -> None:
        """Raise ApiError if ``n`` choices of ``prompts`` prompts exceed the limit of one client."""
        queue = self.engine.waiting
        capacity = self.engine.capacity().slots + min(queue.limit, queue.client_limit or queue.limit)
        if prompts * body.n > capacity:
            param = "n" if body.n > 1 else "prompt"
            message = (
                f"{param}: more choices than one client may have in the slots and the queue ({capacity}); send fewer, "
                "or start the server with a larger --max-waiting or --max-client-share"
            )
            raise ApiError(message, param=param)

    def _check_characters(self, count: int, param: str) -> None:
        if count > self._most_characters:
            raise self._too_long(f"{count} characters", param)

    def _too_long(self, what: str, param: str) -> ApiError:
        message = f"{param}: {what} do not fit into a sequence of {self.max_len} tokens; use fewer"
        return ApiError(message, param=param, code="context_length_exceeded")

    async def in_thread(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """Run a call in a thread: it would block the event loop."""
        # A partial has no frame. An error could keep a frame, and its arguments, alive.
        call = functools.partial(function, *arguments, **keywords)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def start(
        self, prompts: Sequence[Prompt], body: GenerationFields, outputs: OutputOptions
    ) -> list[Continuation]:
        """Submit ``n`` continuations of each prompt, in order. Either all are submitted, or none.

        Raises:
            ApiError: a request cannot be submitted.
        """
        note = current.get(None)
        client = None if note is None else note.client
        submitting = asyncio.ensure_future(self.in_thread(self._submit, prompts, body, outputs, client))
        try:
            requests: list[Request] = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            # The client has left, and requests that the thread submits have no reader.
            submitting.add_done_callback(_cancel_all)
            raise
        if note is not None:
            note.requests, note.user = requests, body.user or body.safety_identifier
        return [
            Continuation(index, request, self._text(request.prompt, body)) for index, request in enumerate(requests)
        ]

    def _text(self, prompt: list[int], body: GenerationFields) -> AnswerText:
        least, skips = body.min_tokens or 0, body.skip_special_tokens
        return AnswerText(self.tokenizer, prompt, body.stop, least, skip_special_tokens=skips)

    def _submit(
        self, prompts: Sequence[Prompt], body: GenerationFields, outputs: OutputOptions, client: tuple[str, ...] | None
    ) -> list[Request]:
        if body.priority and not self.options.keys:
            message = "priority: this server has no API key, so any client could go before all others; leave it out"
            raise ApiError(message, param="priority", code="unsupported_field")
        arguments = sampling_arguments(body, self.spec.generation_config) | self._prediction(body)
        arguments |= self._ends(body, outputs)
        arguments["client"] = client
        self.check_choices(len(prompts), body)
        requests: list[Request] = []
        try:
            for index in range(len(prompts) * body.n):
                prompt = prompts[index // body.n]
                if index % body.n == 0:
                    # All choices of a prompt have the same images.
                    arguments["inputs"] = self._embedded(prompt)
                requests.append(self._submit_one(prompt, index, body, outputs, arguments))
        except BaseException:
            for request in requests:
                request.cancel()
            raise
        return requests

    def _ends(self, body: GenerationFields, outputs: OutputOptions) -> dict[str, Any]:
        """Argument of ``submit`` for the tokens that end a text.

        Raises:
            ApiError: there are too many tokens, they are not token ids, or the guide may need one of them as text.
        """
        ends = [*body.stop_token_ids, *outputs.end_tokens]
        vocab_size = self.engine.arena.layout.vocab_size
        found = eos_arguments(ends, self.spec.generation_config, vocab_size, ignore_eos=body.ignore_eos)
        if outputs.guide is not None and not all(map(self.vocabulary.is_special, body.stop_token_ids)):
            message = f"stop_token_ids: beside {outputs.guide_field} only special tokens can end a text; use stop"
            raise ApiError(message, param="stop_token_ids")
        return found

    def _prediction(self, body: GenerationFields) -> dict[str, Any]:
        """Argument of ``submit`` for a predicted text.

        Raises:
            ApiError: no drafter uses predictions.
        """
        if body.prediction is None:
            return {}
        if Prediction.name not in self.drafters:
            message = f"prediction: not supported, since the server drafts only by {' and '.join(self.drafters)}"
            raise ApiError(message, param="prediction", code="unsupported_field")
        self.check_text(body.prediction.content, "prediction")
        return {"prediction": text_ids(self.tokenizer, body.prediction.content, special=False)}

    def _embedded(self, prompt: Prompt) -> Features | None:
        """Embed the images of ``prompt``; None without images.

        Raises:
            ApiError: they cannot be used.
        """
        try:
            return self.engine.embed(prompt.ids, prompt.inputs) if prompt.inputs else None
        except Exception as error:
            raise self._reported(error, prompt.field) from None

    def _reported(self, error: Exception, field: str, guide_field: str | None = None) -> ApiError:
        """The error for the client. A fault of the server is logged."""
        answer = engine_error(error, field, guide_field)
        if answer.status == 500:
            log.exception("a request could not be submitted")
        return answer

    def _submit_one(
        self, prompt: Prompt, index: int, body: GenerationFields, outputs: OutputOptions, arguments: dict[str, Any]
    ) -> Request:
        most = max(1, self.max_len - len(prompt.ids))
        try:
            return self.engine.submit(
                prompt.ids,
                max_new_tokens=most if outputs.max_new_tokens is None else min(outputs.max_new_tokens, most),
                seed=seed_of(body, index % body.n),
                # In vLLM smaller numbers have precedence.
                priority=-body.priority,
                num_draft_tokens=body.num_draft_tokens,
                logprobs=outputs.logprobs,
                prompt_logprobs=outputs.prompt_logprobs,
                top_logprobs=outputs.top_logprobs,
                stopping_criteria=StopTexts(self._text(prompt.ids, body)) if body.stop else None,
                guide=outputs.guide,
                adapter=None if self.model_of(body.model) == self.name else body.model,
                **arguments,
            )
        except Exception as error:
            raise self._reported(error, prompt.field, outputs.guide_field) from None


def _characters(value: Any) -> int:
    """Number of characters of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(name) + _characters(item) for name, item in value.items())
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _cancel_all(submitting: asyncio.Future[list[Request]]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        for request in submitting.result():
            request.cancel()
