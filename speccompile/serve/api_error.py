"""Errors of the OpenAI API, and their derivation from the package's errors."""

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
    UnusableInputs,
    UserError,
)
from speccompile.errors.base import LONGEST_VALUE, clipped

#: Field of the API by the engine's name of the option. Other options have the same name in both.
_FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "eos_token_id": "ignore_eos"}
_PROMPT_ERRORS = (EmptyPrompt, PromptTooLong, PlaceholderToken, TokenOutOfVocabulary, UnusableInputs)
#: Seconds after which a client may try again when the queue is full.
RETRY_SECONDS = 1
#: Largest number of characters of a message. A list of all fields has about 700.
_LONGEST_MESSAGE = 1500


class ApiError(Exception):
    """An error response.

    Args:
        message: what is wrong, and what to do. A long one is truncated, since it may quote the client.
        status: of HTTP.
        param: the wrong field, as the client wrote it: ``messages[0].role``. A long one is truncated.
        code: a word for programs.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        self.message = clipped(message, _LONGEST_MESSAGE)
        self.status, self.code = status, code
        self.param = None if param is None else clipped(param, LONGEST_VALUE - 3)
        super().__init__(self.message)

    @property
    def kind(self) -> str:
        """OpenAI's ``type`` of the error."""
        named = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return named.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """JSON of the response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The response, with the headers of its status."""
        own = {429: {"Retry-After": str(RETRY_SECONDS)}, 401: {"WWW-Authenticate": "Bearer"}}.get(self.status, {})
        return JSONResponse(self.body(), self.status, {**own, **(headers or {})})


def drop_frames(error: BaseException) -> None:
    """Remove the frames of ``error`` and of the errors before it.

    The frames hold the body of the request, often in a cycle that only Python's garbage collector frees. It runs
    rarely, and hundreds of megabytes could accumulate.
    """
    found: BaseException | None = error
    while found is not None:
        # Frames of Jinja are in a cycle of their references, separate from the error.
        traceback.clear_frames(found.__traceback__)
        context, found.__traceback__, found.__context__ = found.__context__, None, None
        found = context


def closed_error() -> ApiError:
    """Error for a client of a server that shuts down."""
    return ApiError("the server is shutting down", status=503, code="closed")


def engine_error(error: Exception, prompt_field: str, guide_field: str | None = None) -> ApiError:
    """Error for a client when ``submit`` raises ``error``. Faults that are not the request's are not described.

    Args:
        prompt_field: field that the prompt comes from.
        guide_field: field that the guide comes from.
    """
    if isinstance(error, ClientQueueFull):
        message = (
            "your requests in the queue have reached the limit of one client; send fewer at a time, or start the "
            "server with a larger --max-waiting or --max-client-share"
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
        # The engine names a prompt that is not token ids by its number.
        renamed = {"guide": guide_field, "prompt 0": prompt_field}
        param = renamed.get(name, _FIELDS.get(name, name))
        return ApiError(f"{param}: {error.fields['reason']}", param=param)
    if isinstance(error, UserError):
        return ApiError(str(error))
    return ApiError("the engine failed; the server's log has the reason", status=500, code="engine_failed")


def _for_clients(message: str) -> str:
    """Remove advice about ``wrap``, which a client cannot call, and the number of a row."""
    message = re.sub(r"prompt \d+ (has|holds|is)", r"the prompt \1", message)
    return re.sub(r", or wrap with a larger max_len", "", message)
