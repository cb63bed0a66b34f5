"""Logits, scores and log-probabilities that a request returns beside its tokens, and their records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from speccompile.errors import InvalidOption
from speccompile.graph.arena import Arena

#: State tensors that a step writes, by field of :class:`ExtraOutputs`.
STATE = {"logprobs": "token_logprobs", "logits": "kept_logits", "scores": "kept_scores"}

#: Values of some positions, by field of :class:`ExtraOutputs`: float32 ``[n]`` or ``[n, V]``.
Record = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ExtraOutputs:
    """The outputs of a request beside its tokens; false without any.

    Args:
        logprobs, prompt_logprobs: log-probabilities of its new tokens, and of its prompt tokens.
        logits, scores: values of each new token, before and after the processors.
        top_logprobs: number of the likeliest tokens, at each new token.
    """

    logprobs: bool = False
    prompt_logprobs: bool = False
    logits: bool = False
    scores: bool = False
    top_logprobs: int = 0

    def __bool__(self) -> bool:
        return bool(self.logprobs or self.prompt_logprobs or self.logits or self.scores or self.top_logprobs)


def check_kept(where: str, name: str, value: int, arena: Arena) -> None:
    """Check that the wrap has state for a step's logits and scores, if an option needs them.

    Raises:
        InvalidOption: it has none.
    """
    if value and "kept_logits" not in arena:
        reason = "the wrap has no state for a step's logits; wrap with scores=True"
        raise InvalidOption(where=where, name=name, value=value, reason=reason)


class Records:
    """The records of one request. There may be more records than tokens, since a stop drops tokens.

    Args:
        num_logits: number of tokens that logits and scores cover; None means all.
    """

    def __init__(self, outputs: ExtraOutputs, arena: Mapping[str, torch.Tensor], num_logits: int | None = None) -> None:
        self._num_logits = num_logits
        kept = {name: self._kept(arena, name) for name in STATE if getattr(outputs, name)}
        # Not views, which would keep the memory of the arena alive.
        self._parts = {name: [tensor.new_empty(0, *tensor.shape[2:])] for name, tensor in kept.items()}
        self._top = outputs.top_logprobs
        if self._top:
            logits = arena["kept_logits"]
            self._parts |= {
                "top_logprobs": [logits.new_empty(0, self._top)],
                "top_tokens": [logits.new_empty(0, self._top, dtype=torch.int64)],
            }
        self._prompt: list[float | None] | None = [None] if outputs.prompt_logprobs else None
        self._prompt_top: list[list[tuple[int, float]] | None] | None = [None] if outputs.prompt_logprobs else None

    def read(self, arena: Mapping[str, torch.Tensor], slot: int, count: int) -> Record:
        """Copy the records of the first ``count`` positions, which the next run overwrites."""
        record = {name: self._kept(arena, name)[slot, :count].clone() for name in self._parts if name in STATE}
        if self._top:
            logprobs = arena["kept_logits"][slot, :count].log_softmax(-1)
            record["top_logprobs"], record["top_tokens"] = logprobs.topk(self._top)
        return record

    def _kept(self, arena: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        kept = arena[STATE[name]]
        return kept if name == "logprobs" else kept[..., : self._num_logits]

    def restart_prompt(self) -> None:
        """Drop what was recorded of the prompt, which is read again from its beginning."""
        for kept in (self._prompt, self._prompt_top):
            if kept is not None:
                del kept[1:]

    def add(self, record: Record, emitted: int) -> None:
        """Append the scores of a step's first ``emitted`` positions."""
        for name, part in record.items():
            # A view would keep the memory of positions that were not emitted.
            self._parts[name].append(part if len(part) == emitted else part[:emitted].clone())

    def read_prompt(self, arena: Mapping[str, torch.Tensor], count: int) -> None:
        """Append the log-probabilities of the tokens after the first ``count`` positions of the newest chunk, and the
        likeliest tokens at these positions."""
        assert self._prompt is not None and self._prompt_top is not None
        self._prompt += arena["chunk_logprobs"][:count].tolist()
        tokens, logprobs = (
            arena[name][:count, : max(1, self._top)].tolist() for name in ("chunk_best", "chunk_best_logprobs")
        )
        self._prompt_top += [list(zip(*pair, strict=True)) for pair in zip(tokens, logprobs, strict=True)]

    @property
    def prompt_logprobs(self) -> list[float | None] | None:
        """The log-probability of each processed prompt token, given those before it; None for the first one."""
        return None if self._prompt is None else list(self._prompt)

    @property
    def prompt_best(self) -> list[tuple[int, float] | None] | None:
        """The likeliest token at each processed prompt token, with its log-probability; None for the first one."""
        return None if self._prompt_top is None else [None if top is None else top[0] for top in self._prompt_top]

    @property
    def prompt_top_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        """The likeliest tokens at each processed prompt token, at least one and at most
        :data:`~speccompile.graph.state.PROMPT_TOP`, with their log-probabilities; None for the first one."""
        return None if self._prompt_top is None else list(self._prompt_top)

    def top_logprobs(self, count: int) -> list[list[tuple[int, float]]] | None:
        """Return the likeliest tokens at the first ``count`` new tokens, with their log-probabilities; None if not
        requested."""
        tokens, logprobs = self._joined("top_tokens", count), self._joined("top_logprobs", count)
        if tokens is None or logprobs is None:
            return None
        return [
            list(zip(ids, values, strict=True)) for ids, values in zip(tokens.tolist(), logprobs.tolist(), strict=True)
        ]

    def logprobs(self, count: int) -> list[float] | None:
        """Return the log-probabilities of the first ``count`` new tokens; None if not requested."""
        joined = self._joined("logprobs", count)
        return None if joined is None else joined.tolist()

    def logits(self, count: int) -> torch.Tensor | None:
        """Return logits ``[count, V]``; None if not requested."""
        return self._joined("logits", count)

    def scores(self, count: int) -> torch.Tensor | None:
        """Return scores ``[count, V]``; None if not requested."""
        return self._joined("scores", count)

    def _joined(self, name: str, count: int) -> torch.Tensor | None:
        return torch.cat(self._parts[name])[:count] if name in self._parts else None
