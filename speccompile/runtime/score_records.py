"""What a request wants to know beside its tokens, and what has been recorded of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch

from speccompile.errors import InvalidOption
from speccompile.graph.arena import Arena

#: Where a step leaves what a request may want, by field of :class:`Wanted`.
STATE = {"logprobs": "token_logprobs", "logits": "kept_logits", "scores": "kept_scores"}

#: Of some places, by field of :class:`Wanted`: float32 ``[n]`` or ``[n, V]``.
Record = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RecordRequest:
    """What a request wants to know beside its tokens; false if nothing.

    Args:
        logprobs, prompt_logprobs: of its new tokens, and of its prompt's own.
        logits, scores: what each new token was chosen from, before and behind the processors.
    """

    logprobs: bool = False
    prompt_logprobs: bool = False
    logits: bool = False
    scores: bool = False

    def __bool__(self) -> bool:
        return any(astuple(self))


def check_kept(where: str, name: str, value: bool, arena: Arena) -> None:
    """Raises InvalidOption: an option needs a step's logits and scores, and the wrap has no room for them."""
    if value and "kept_logits" not in arena:
        reason = "there is no room for a step's logits; wrap with scores=True"
        raise InvalidOption(where=where, name=name, value=value, reason=reason)


class Records:
    """What was recorded of one request. It may be ahead of the request's tokens, which a stop cuts."""

    def __init__(self, wanted: RecordRequest, arena: Mapping[str, torch.Tensor]) -> None:
        names = [name for name in STATE if getattr(wanted, name)]
        self._parts = {name: [arena[STATE[name]].new_empty(0, *arena[STATE[name]].shape[2:])] for name in names}
        self._prompt: list[float | None] | None = [None] if wanted.prompt_logprobs else None

    def look(self, arena: Mapping[str, torch.Tensor], slot: int, count: int) -> Record:
        """A copy of what a run has recorded for the first ``count`` places, since the next run overwrites it."""
        return {name: arena[STATE[name]][slot, :count].clone() for name in self._parts}

    def add(self, record: Record, emitted: int) -> None:
        for name, part in record.items():
            # A view would keep what was not emitted, too.
            self._parts[name].append(part if len(part) == emitted else part[:emitted].clone())

    def add_prompt(self, logprobs: Sequence[float]) -> None:
        assert self._prompt is not None
        self._prompt.extend(logprobs)

    @property
    def prompt_logprobs(self) -> list[float | None] | None:
        """Of each prompt token that was read, behind those in front of it; None for the first one."""
        return None if self._prompt is None else list(self._prompt)

    def logprobs(self, count: int) -> list[float] | None:
        """Of the first ``count`` new tokens; None if not wanted."""
        joined = self._joined("logprobs", count)
        return None if joined is None else joined.tolist()

    def logits(self, count: int) -> torch.Tensor | None:
        """``[count, V]``; None if not wanted."""
        return self._joined("logits", count)

    def scores(self, count: int) -> torch.Tensor | None:
        """``[count, V]``; None if not wanted."""
        return self._joined("scores", count)

    def _joined(self, name: str, count: int) -> torch.Tensor | None:
        return torch.cat(self._parts[name])[:count] if name in self._parts else None
