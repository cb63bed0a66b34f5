"""Token traces as columns: the files that ``spec.record_trace(path, tokens=True)`` writes."""

from __future__ import annotations

import base64
import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from speccompile.errors import InvalidOption, InvalidTrace
from speccompile.policies.costs import CostTable
from speccompile.runtime.token_trace import ID, TOKENS_FORMAT, VALUE
from speccompile.runtime.trace_reader import read_trace

#: Drafter of a token that is not a draft.
NO_DRAFTER = -1


@dataclass(frozen=True)
class TracedRequest:
    """A request of a trace.

    Args:
        number: its number in the columns.
        prompt: ids of its prompt.
        tokens: ids of its new tokens. Those of the prompt's own pass are first: it has at most one.
        before_steps: number of new tokens before the first step.
        max_new_tokens, num_draft_tokens: limits of the request. ``num_draft_tokens`` may be None: no limit.
        prediction: ids that the request predicted.
        greedy: its tokens are the likeliest ones.
    """

    number: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    before_steps: int
    max_new_tokens: int
    num_draft_tokens: int | None
    prediction: tuple[int, ...]
    greedy: bool


@dataclass(frozen=True)
class TokenTrace:
    """A trace with tokens. Columns are arrays of equal length.

    Args:
        draft_lens: draft lengths of the tiers.
        max_len: most tokens of a sequence.
        vocab_size: number of the target's tokens.
        text_invariant: no request's tokens depend on drafts (the acceptance rule is ``exact`` or the like).
        drafters: names of the drafters, to which the columns ``drafter`` refer.
        top: number of the target's likeliest tokens at each emitted token.
        costs: costs of the tiers, if they were timed.
        requests: the requests, in the order in which they began.
        steps: a row for each step of each request: ``request``, ``tier`` (K), ``context`` (tokens before the step),
            ``proposed``, ``accepted``, ``emitted``, ``rows`` (requests in the step), ``ms`` (NaN if not known).
        tokens: a row for each token that a step emitted: ``step`` (row of ``steps``), ``request``, ``index`` (among the
            request's new tokens), ``token``, ``accepted`` (it was a draft), ``drafter`` (-1 if it was not), ``entropy``
            (nats), ``top_tokens`` int32 ``[n, top]`` and ``top_logprobs`` float32 ``[n, top]``.
        drafts: a row for each judged draft: ``step``, ``request``, ``position`` (from 0), ``token`` (-1 if not known),
            ``accepted``, ``drafter``, ``score`` (the probability that it and all drafts before it are right; NaN if the
            drafter has none). Drafts that a guide forces count as those of the drafter.
    """

    draft_lens: tuple[int, ...]
    max_len: int
    vocab_size: int
    text_invariant: bool
    drafters: tuple[str, ...]
    top: int
    costs: CostTable | None
    requests: tuple[TracedRequest, ...]
    steps: Mapping[str, np.ndarray]
    tokens: Mapping[str, np.ndarray]
    drafts: Mapping[str, np.ndarray]

    def frame(self, table: Literal["steps", "tokens", "drafts"]) -> Any:
        """A table as a pandas ``DataFrame``. Columns of likeliest tokens become ``top_tokens_0`` and so on.

        Raises:
            InvalidOption: pandas is not installed, or there is no such table.
        """
        if table not in ("steps", "tokens", "drafts"):
            raise InvalidOption(where="frame", name="table", value=table, reason="choose from steps, tokens, drafts")
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            reason = "it needs the library pandas: pip install pandas; the columns are arrays without it"
            raise InvalidOption(where="frame", name="table", value=table, reason=reason) from error
        columns: dict[str, np.ndarray] = {}
        for name, values in getattr(self, table).items():
            if values.ndim == 1:
                columns[name] = values
            else:
                columns |= {f"{name}_{index}": values[:, index] for index in range(values.shape[1])}
        return pandas.DataFrame(columns)


def read_token_trace(path: str | os.PathLike[str]) -> TokenTrace:
    """Read a trace with tokens.

    Raises:
        InvalidTrace: the file cannot be read, or has no tokens.
    """
    run = read_trace(path)
    with Path(path).open(encoding="utf-8") as file:
        head = json.loads(file.readline())
        if "tokens" not in head:
            raise InvalidTrace(path=str(path), reason="it has no tokens; record with tokens=True")
        if head["tokens"] != TOKENS_FORMAT:
            reason = f"its tokens are of format {head['tokens']}, and only {TOKENS_FORMAT} is read"
            raise InvalidTrace(path=str(path), reason=reason)
        columns = _Columns(int(head["top"]))
        try:
            for line in file:
                if line.strip():
                    columns.add(json.loads(line))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            reason = f"its tokens cannot be read ({type(error).__name__}: {error})"
            raise InvalidTrace(path=str(path), reason=reason) from error
    steps, tokens, drafts = columns.arrays()
    return TokenTrace(
        draft_lens=run.draft_lens,
        max_len=int(head["max_len"]),
        vocab_size=int(head["vocab_size"]),
        text_invariant=bool(head["text_invariant"]),
        drafters=tuple(head["drafters"]),
        top=columns.top,
        costs=run.costs,
        requests=columns.requests(),
        steps=steps,
        tokens=tokens,
        drafts=drafts,
    )


def _ids(text: str) -> tuple[int, ...]:
    return tuple(np.frombuffer(base64.b64decode(text), ID).tolist())


class _Columns:
    """Columns of the lines that have been added."""

    def __init__(self, top: int) -> None:
        self.top = top
        self._begun: dict[int, dict[str, Any]] = {}
        self._new: dict[int, list[int]] = {}
        self._steps: list[tuple[float, ...]] = []
        self._tokens: list[tuple[int, ...]] = []
        self._drafts: list[tuple[float, ...]] = []
        self._top_ids: list[np.ndarray] = []
        self._top_logprobs: list[np.ndarray] = []
        self._entropy: list[np.ndarray] = []

    def add(self, line: dict[str, Any]) -> None:
        """Add a step."""
        for number, about in line.get("begun", {}).items():
            self._begun[int(number)] = about
            self._new[int(number)] = list(_ids(about["ids"])[about["prompt"] :])
        for row, packed in enumerate(line["packed"]):
            if packed:
                self._add_row(line, row, base64.b64decode(packed))

    def _add_row(self, line: dict[str, Any], row: int, packed: bytes) -> None:
        request, emitted, proposed, accepted = (
            int(line[name][row]) for name in ("requests", "emitted", "proposed", "accepted")
        )
        ids = np.frombuffer(packed, ID, emitted + proposed).tolist()
        new, drafts = ids[:emitted], ids[emitted:]
        # Of accepted drafts, the ids are always known.
        right = min(accepted, emitted)
        drafts[:right] = new[:right]
        step, source, begin = len(self._steps), int(line["by"][row]), len(self._new[request])
        ms = float("nan") if line["ms"] is None else float(line["ms"])
        context = int(line["contexts"][row])
        self._steps.append((request, int(line["k"]), context, proposed, accepted, emitted, len(line["requests"]), ms))
        for index, token in enumerate(new):
            drafted = index < right
            self._tokens.append((step, request, begin + index, token, drafted, source if drafted else NO_DRAFTER))
        scores = line["scores"][row] if line.get("scores") else ()
        for position, token in enumerate(drafts):
            score = scores[position] if position < len(scores) else float("nan")
            self._drafts.append((step, request, position, token, position < accepted, source, score))
        self._new[request] += new
        if self.top:
            at, count = 4 * (emitted + proposed), emitted * self.top
            self._top_ids.append(np.frombuffer(packed, ID, count, at).reshape(emitted, self.top))
            at += 4 * count
            self._top_logprobs.append(np.frombuffer(packed, VALUE, count, at).reshape(emitted, self.top))
            self._entropy.append(np.frombuffer(packed, VALUE, emitted, at + 2 * count))

    def requests(self) -> tuple[TracedRequest, ...]:
        """The requests, in the order in which they began."""
        return tuple(
            TracedRequest(
                number,
                _ids(about["ids"])[: about["prompt"]],
                tuple(self._new[number]),
                len(_ids(about["ids"])) - about["prompt"],
                int(about["max_new_tokens"]),
                about["num_draft_tokens"],
                _ids(about["prediction"]),
                bool(about["greedy"]),
            )
            for number, about in self._begun.items()
        )

    def arrays(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Steps, tokens and drafts."""
        count = len(self._tokens)
        tokens = _table(self._tokens, ("step", "request", "index", "token", "accepted", "drafter"))
        tokens["entropy"] = _joined(self._entropy, (count,), np.float32)
        tokens["top_tokens"] = _joined(self._top_ids, (count, self.top), np.int32)
        tokens["top_logprobs"] = _joined(self._top_logprobs, (count, self.top), np.float32)
        steps = _table(self._steps, ("request", "tier", "context", "proposed", "accepted", "emitted", "rows"), ("ms",))
        drafts = ("step", "request", "position", "token", "accepted", "drafter")
        return steps, tokens, _table(self._drafts, drafts, ("score",))


def _table(rows: list[tuple[Any, ...]], whole: tuple[str, ...], real: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Columns of ``rows``. ``real`` are float64, ``accepted`` of tokens and drafts is bool, others are int64."""
    names = (*whole, *real)
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    found = {}
    for name, values in zip(names, columns, strict=True):
        kind: Any = np.float64 if name in real else np.bool_ if name == "accepted" and "step" in names else np.int64
        found[name] = np.array(values, kind)
    return found


def _joined(parts: list[np.ndarray], shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if not parts:
        return np.full(shape, np.nan, dtype) if dtype == np.float32 else np.zeros(shape, dtype)
    return np.concatenate(parts).astype(dtype)
