"""Drafters without a model: each proposes from the tokens of one sequence, as it does at the end of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from speccompile.errors import DraftFailed, InvalidOption, error_line
from speccompile.graph.arena import Arena
from speccompile.graph.state import core_state, resolve_layout
from speccompile.graph.step_form import StepForm
from speccompile.modes import Mode
from speccompile.modes.base import HostDraft
from speccompile.passes.step.drafts import PROPOSED, proposed_drafts
from speccompile.passes.step.propose import Propose, propose_and_store
from speccompile.traces.reader import TokenTrace, TracedRequest

#: The slot of the sequence.
_SLOT = 0


class TracedDrafter(Protocol):
    """A drafter of one sequence at a time."""

    def begin(self, request: TracedRequest) -> None:
        """Begin the sequence of ``request``."""

    def drafts(self, text: Sequence[int], limit: int) -> list[int]:
        """Draft tokens after ``text``, which continues the text of the call before.

        Args:
            limit: most tokens of the sequence. A step has no drafts that could not be emitted.
        """

    def end(self, text: Sequence[int], limit: int) -> None:
        """End the sequence, whose whole text is ``text``."""


def drafter_of(mode: Mode, trace: TokenTrace, draft_len: int) -> TracedDrafter:
    """The drafter of a mode.

    Raises:
        InvalidOption: its drafts do not only depend on tokens.
    """
    if mode.host_draft is not None:
        return HostReplay(mode.host_draft, draft_len)
    form = StepForm(draft_len, deepest=draft_len)
    passes = mode.after_commit(form) if mode.ready else []
    proposes = [item for item in passes if type(item) is Propose]
    if len(proposes) != 1 or len(passes) != 1 or mode.after_logits(form) or mode.drafts_from_hidden:
        reason = "it drafts from more than tokens; replay lookups (ngram, suffix, prediction) and your own drafters"
        raise InvalidOption(where="replay", name="mode", value=mode.name, reason=reason)
    return ReadyReplay(mode, proposes[0], trace, draft_len)


class ReadyReplay:
    """A drafter that is a part of steps. Its own state is that of a wrap with one slot; what it remembers of a sequence
    serves the next ones."""

    def __init__(self, mode: Mode, propose: Propose, trace: TokenTrace, draft_len: int) -> None:
        self._mode, self._propose, self._trace, self._draft_len = mode, propose, trace, draft_len
        self._arena: Arena | None = None

    def begin(self, request: TracedRequest) -> None:
        """See :class:`TracedDrafter`."""
        before, trace, longest = self._arena, self._trace, self._draft_len
        specs = [*core_state(trace.vocab_size), *self._mode.state((0, longest))]
        sizes = {"max_batch": 1, "max_len": trace.max_len, "max_draft_len": longest, "max_width": longest + 1}
        arena = self._arena = Arena(resolve_layout(specs, **sizes, vocab_size=trace.vocab_size), torch.device("cpu"))
        self._mode.start(arena)
        for name in self._mode.memory.tables if before is not None else ():
            assert before is not None
            arena[name].copy_(before[name])
        arena["prompt_length"][_SLOT] = len(request.prompt)
        if "prediction" in arena:
            arena["prediction"][_SLOT, : len(request.prediction)] = torch.tensor(request.prediction, dtype=torch.int64)
            arena["prediction_length"][_SLOT] = len(request.prediction)

    def drafts(self, text: Sequence[int], limit: int) -> list[int]:
        """See :class:`TracedDrafter`."""
        arena, propose = self._arena, self._propose
        assert arena is not None
        known = int(arena["length"][_SLOT])
        arena["tokens"][_SLOT, known : len(text)] = torch.tensor(text[known:], dtype=torch.int64)
        arena["length"][_SLOT], arena["limit"][_SLOT] = len(text), limit
        slots = torch.tensor([_SLOT])
        core = [arena[name] for name in ("tokens", "length", "limit", *PROPOSED)]
        weights = [value for _, value in propose.weights]
        propose_and_store(
            *core,
            slots,
            *([arena["draft_score"]] if propose.scored else []),
            *[arena[name] for name in propose.state],
            *weights,
            propose=propose.propose,
            whole=propose.whole,
            longest=self._draft_len,
            scored=propose.scored,
            stateful=bool(propose.state),
            vocab_size=self._trace.vocab_size if propose.foreign else None,
            facts=frozenset(),
        )
        state = [arena[name] for name in (*PROPOSED, "length", "limit")]
        drafts, lens = proposed_drafts(state[0], state[1], state[2], state[3], slots, draft_len=self._draft_len)
        found: list[int] = drafts[0, : int(lens)].tolist()
        return found

    def end(self, text: Sequence[int], limit: int) -> None:
        """See :class:`TracedDrafter`."""
        # The last step proposes, too, and thus reads the last tokens.
        self.drafts(text, limit)


class HostReplay:
    """A drafter on the host, which is called for each step that can have drafts."""

    def __init__(self, draft: HostDraft, draft_len: int) -> None:
        self._draft, self._draft_len = draft, draft_len

    def begin(self, request: TracedRequest) -> None:
        """Nothing to prepare: the drafter receives the whole sequence."""

    def drafts(self, text: Sequence[int], limit: int) -> list[int]:
        """See :class:`TracedDrafter`.

        Raises:
            DraftFailed: the drafter raised.
        """
        most = min(self._draft_len, limit - len(text) - 1)
        if most <= 0:
            return []
        try:
            return list(self._draft(list(text), most) or [])[:most]
        except Exception as error:
            raise DraftFailed(reason=error_line(error)) from error

    def end(self, text: Sequence[int], limit: int) -> None:
        """Nothing to do: the drafter is called for steps only."""
