"""One choice of a response: a request of the engine with its visible text."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from speccompile.errors import InvalidGuide, RequestFailed
from speccompile.errors.base import clipped
from speccompile.runtime.request import Request
from speccompile.serve.api_error import ApiError, closed_error
from speccompile.serve.logprobs import TokenLogprob
from speccompile.serve.text import AnswerText

log = logging.getLogger("speccompile.serve")

#: ``finish_reason`` of the API, by that of the engine.
FINISH_REASONS = {"eos": "stop", "stop": "stop", "max_new_tokens": "length", "max_len": "length"}


@dataclass(frozen=True)
class Piece:
    """New text and tokens of one step.

    Args:
        text: may be empty, if only a part of a character or of a stop string has arrived.
        tokens: indices ``[start, end)`` of the new tokens.
        finish_reason: of the last piece, a value of the API.
    """

    text: str
    tokens: range
    finish_reason: str | None = None


class Continuation:
    """Reader of a request. If it is closed before the end, the request is cancelled."""

    def __init__(self, index: int, request: Request, text: AnswerText) -> None:
        self.index = index
        self.request = request
        self._text = text

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the new text of each step.

        Raises:
            ApiError: the request failed, or was cancelled by the engine.
        """
        request, seen = self.request, 0
        try:
            async with contextlib.aclosing(_steps(request)) as steps:
                async for tokens in steps:
                    yield Piece(self._text.add(self._shown(tokens)), range(seen, seen + len(tokens)))
                    seen += len(tokens)
        finally:
            request.cancel()
        if request.finish_reason not in FINISH_REASONS:
            raise closed_error()
        yield Piece(self._text.end(), range(seen, seen), FINISH_REASONS[request.finish_reason])

    def _shown(self, tokens: Sequence[int]) -> Sequence[int]:
        """Remove the token that ended the text. It may have a text, since a request can name any token."""
        return tokens[:-1] if tokens[-1] in self.request.params.eos else tokens

    def logprobs(self, positions: range) -> list[TokenLogprob]:
        """Log-probabilities of the new tokens at ``positions``, for a request that records them."""
        records, tokens = self.request.records, self.request.new_tokens
        logprobs, tops = records.logprobs(positions.stop), records.top_logprobs(positions.stop)
        assert logprobs is not None
        return [TokenLogprob(tokens[i], logprobs[i], () if tops is None else tops[i]) for i in positions]

    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the prompt, available with the first new token."""
        logprobs, tops = self.request.records.prompt_logprobs, self.request.records.prompt_top_logprobs
        assert logprobs is not None and tops is not None
        return [
            TokenLogprob(token, logprob, top or ())
            for token, logprob, top in zip(self.request.prompt, logprobs, tops, strict=True)
        ]


async def _steps(request: Request) -> AsyncGenerator[list[int], None]:
    """Yield the new tokens of each step.

    Raises:
        ApiError: the request failed.
    """
    tokens: list[int] = []
    seen = 0
    try:
        async for token in request.stream():
            tokens.append(token)
            seen += 1
            if seen == len(request.new_tokens):
                yield tokens
                tokens = []
    except RequestFailed as error:
        if isinstance(cause := error.__cause__, InvalidGuide):
            # For instance a pattern that exceeds the limits of the library that follows it.
            message = f"the structure of the text cannot be followed further: {clipped(str(cause.fields['reason']))}"
            raise ApiError(message, code="invalid_guide") from None
        log.error("a request failed", exc_info=error)
        raise ApiError("the engine failed; the server's log has the reason", status=500, code="engine_failed") from None
    if tokens:
        yield tokens
