"""Errors as the OpenAI API reports them, and which of them the package's own errors become."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from speccompile.errors import (
    ClientQueueFull,
    Closed,
    EmptyPrompt,
    InvalidGuide,
    InvalidInput,
    InvalidOption,
    PlaceholderToken,
    PromptTooLong,
    QueueFull,
    TokenOutOfVocabulary,
    UserError,
)
from speccompile.errors.base import LONGEST_VALUE, clipped

#: Fields of the API, by the engine's name of what they set. All others have the same name.
_FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "eos_token_id": "ignore_eos"}
_PROMPT_ERRORS = (EmptyPrompt, PromptTooLong, PlaceholderToken, TokenOutOfVocabulary)
#: Seconds after which a client that found the queue full may try again.
RETRY_SECONDS = 1
#: Characters of a message: a list of all fields is 700.
_LONGEST_MESSAGE = 1500


class ApiError(Exception):
    """An answer that is an error.

    Args:
        message: what is wrong, and what to do. A long one is cut: it may quote what the client wrote.
        status: of HTTP.
        param: the field that is wrong, as the client wrote it: ``messages[0].role``. A long one is cut.
        code: a word for programs.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        self.message = clipped(message, _LONGEST_MESSAGE)
        self.status, self.code = status, code
        self.param = None if param is None else clipped(param, LONGEST_VALUE - 3)
        super().__init__(self.message)

    @property
    def kind(self) -> str:
        """OpenAI's ``type``."""
        named = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return named.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The answer, with the headers of its status."""
        own = {429: {"Retry-After": str(RETRY_SECONDS)}, 401: {"WWW-Authenticate": "Bearer"}}.get(self.status, {})
        return JSONResponse(self.body(), self.status, {**own, **(headers or {})})


def drop_frames(error: BaseException) -> None:
    """Forget where ``error``, and what it was raised for, come from. Those frames hold the body of the request, often
    in a cycle, which only Python's collector of garbage frees, and rarely: hundreds of megabytes would wait for it."""
    found: BaseException | None = error
    while found is not None:
        # Frames of Jinja refer to each other beside the error.
        traceback.clear_frames(found.__traceback__)
        context, found.__traceback__, found.__context__ = found.__context__, None, None
        found = context


def closed_error() -> ApiError:
    """The answer of a server that ends."""
    return ApiError("the server is shutting down", status=503, code="closed")


def engine_error(error: Exception, prompt_field: str, guide_field: str | None = None) -> ApiError:
    """What a client receives when ``submit`` raises ``error``. What is not a fault of the request is not described.

    Args:
        prompt_field: the field that the prompt was in.
        guide_field: the field that the guide was made of.
    """
    if isinstance(error, ClientQueueFull):
        message = (
            "as many of your requests wait as one client may have; send fewer at a time, or start the server with a "
            "larger --max-waiting or --max-client-share"
        )
        return ApiError(message, status=429, code="client_queue_full")
    if isinstance(error, QueueFull):
        return ApiError("the queue is full; try again later", status=429, code="queue_full")
    if isinstance(error, Closed):
        return closed_error()
    if isinstance(error, _PROMPT_ERRORS):
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        return ApiError(f"{prompt_field}: {_for_clients(str(error))}", param=prompt_field, code=code)
    if isinstance(error, InvalidGuide):
        return ApiError(f"{guide_field}: {clipped(str(error.fields['reason']))}", param=guide_field)
    if isinstance(error, InvalidOption | InvalidInput):
        name = str(error.fields["name"])
        # The engine calls a prompt that is not token ids by its number.
        renamed = {"guide": guide_field, "prompt 0": prompt_field}
        param = renamed.get(name, _FIELDS.get(name, name))
        return ApiError(f"{param}: {error.fields['reason']}", param=param)
    if isinstance(error, UserError):
        return ApiError(str(error))
    return ApiError("the engine failed; the server's log has the reason", status=500, code="engine_failed")


def _for_clients(message: str) -> str:
    """Without advice about ``wrap``, which a client cannot call, and without the number of a row."""
    message = re.sub(r"prompt \d+ (has|holds|is)", r"the prompt \1", message)
    return re.sub(r", or wrap with a larger max_len", "", message)
