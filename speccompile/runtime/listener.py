"""Work on the host for each emitted token of a request: streamers, stop strings, stopping criteria."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList, StopStringCriteria

from speccompile.errors import InvalidInput, shown


@runtime_checkable
class Streamer(Protocol):
    """The interface of a transformers streamer."""

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, then the new tokens of each step, int64."""

    def end(self) -> None:
        """Receive the end, after the last token."""


class Listener:
    """Receives the tokens of one request, in order and one at a time, as in transformers' ``generate``.

    Args:
        prompt: int64 ``[1, P]``. A streamer receives it first. Criteria receive it before the new tokens.
        most: the largest number of new tokens.
        streamer: receives the prompt, then each token.
        criteria: called after each token, with ids ``[1, P + new]`` and no scores.
    """

    def __init__(
        self, prompt: torch.Tensor, most: int, streamer: Streamer | None, criteria: StoppingCriteriaList
    ) -> None:
        self._streamer = streamer
        self._criteria = criteria
        self._prompt = prompt
        self._length = prompt.shape[1]
        # Another thread may write to this tensor, without the caller's inference mode.
        with torch.inference_mode(False):
            self._ids = torch.zeros((1, prompt.shape[1] + most), dtype=torch.int64) if criteria else None
        if self._ids is not None:
            self._ids[:, : self._length] = prompt

    @property
    def is_silent(self) -> bool:
        """Whether there is neither a streamer nor a criterion, so tokens need not be passed on one by one."""
        return self._streamer is None and not self._criteria

    def start(self) -> None:
        """Pass the prompt to the streamer."""
        self._put(self._prompt.cpu())

    def notify(self, token: int) -> bool:
        """Pass on one token. Return whether the request must end after it."""
        self._put(torch.tensor([token]))
        if self._ids is None:
            return False
        self._ids[0, self._length] = token
        self._length += 1
        # transformers passes scores only if they are requested; a criterion that needs them raises its own error.
        return bool(torch.as_tensor(self._criteria(self._ids[:, : self._length], None)).all())

    def _put(self, value: torch.Tensor) -> None:
        # A streamer that raises is not called again.
        streamer, self._streamer = self._streamer, None
        if streamer is not None:
            streamer.put(value)
        self._streamer = streamer

    def end(self) -> None:
        """End the stream. The streamer is only notified once."""
        streamer, self._streamer = self._streamer, None
        if streamer is not None:
            streamer.end()


def check_streamer(streamer: Any) -> None:
    """Check the argument ``streamer``.

    Raises:
        InvalidInput: it is not a streamer.
    """
    if streamer is not None and not isinstance(streamer, Streamer):
        raise InvalidInput(name="streamer", reason="it has no methods put and end; give a transformers streamer")


def check_tokenizer(tokenizer: Any) -> None:
    """Check the argument ``tokenizer``.

    Raises:
        InvalidInput: it is not a tokenizer.
    """
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise InvalidInput(name="tokenizer", reason=f"{shown(tokenizer)} is not a transformers tokenizer")


def make_criteria(
    stop: str | Sequence[str] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    stopping_criteria: Any,
    stop_name: str = "stop",
) -> StoppingCriteriaList:
    """Return all criteria that may end a request on the host, as in transformers. ``stop_name`` is the caller's name
    for ``stop``.

    A stop string ends the sequence with the token that completes it, also if it begins in the prompt (transformers'
    ``StopStringCriteria``).

    Raises:
        InvalidInput: there are stop strings without a tokenizer, or a value is not a stop string or criterion.
    """
    criteria = StoppingCriteriaList()
    if stopping_criteria is not None:
        given = stopping_criteria if isinstance(stopping_criteria, list | tuple) else [stopping_criteria]
        for criterion in given:
            if not callable(criterion):
                raise InvalidInput(
                    name="stopping_criteria",
                    reason=f"{shown(criterion)} is not a StoppingCriteria: it cannot be called",
                )
            criteria.append(criterion)
    if stop is not None:
        strings = [stop] if isinstance(stop, str) else stop
        if not isinstance(strings, list | tuple) or not strings or not all(isinstance(s, str) and s for s in strings):
            raise InvalidInput(
                name=stop_name, reason=f"{shown(stop)} must be a text or a list of texts, none of them empty"
            )
        if tokenizer is None:
            raise InvalidInput(name=stop_name, reason="stop strings need tokenizer=, to know the text of each token")
        criteria.append(_stop_strings(tokenizer, len(tokenizer), tuple(strings)))
    return criteria


# Creating a criterion visits the whole vocabulary, which needs a large part of a second. It has no state, so it is
# cached. ``tokens`` is a part of the key, since tokens may be added to a vocabulary.
@functools.lru_cache(maxsize=32)
def _stop_strings(tokenizer: PreTrainedTokenizerBase, tokens: int, strings: tuple[str, ...]) -> StopStringCriteria:
    return StopStringCriteria(tokenizer=tokenizer, stop_strings=list(strings))
