"""The policy of a wrap at run time. It is called before each step, and receives the results after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from speccompile.errors import InvalidOption
from speccompile.graph.tree import Tree, chains
from speccompile.policies.base import (
    AnyPolicy,
    Chooser,
    Done,
    Ladder,
    LearningPolicy,
    Policy,
    Row,
    StoppingChooser,
    TreeTier,
    Upcoming,
    start,
)
from speccompile.policies.costs import CostTable
from speccompile.policies.fixed import Fixed
from speccompile.policies.options import check_tier
from speccompile.policies.parse import parse_policy
from speccompile.policies.schedule import Schedule
from speccompile.runtime.request import Request
from speccompile.runtime.token_trace import KeptRow, TokenRecorder, about_tokens, keep_row
from speccompile.runtime.trace import Recorder

__all__ = ["AnyPolicy", "Fixed", "Policies", "Policy", "Schedule", "check_tier", "parse_policy"]


class Policies:
    """The current policy, its chooser, and the trace that is being recorded.

    Args:
        policy: the first policy.
        draft_lens: draft lengths of the tiers, ascending. Among policies that learn, only `cost` chooses between chains
            and trees.
        ready: the drafts of a step exist before its tier is chosen.
        measure: times the tiers. It is called once, when a policy needs it.
    """

    def __init__(
        self, policy: AnyPolicy, draft_lens: tuple[int, ...], *, ready: bool, measure: Callable[[], CostTable]
    ) -> None:
        self._draft_lens = draft_lens
        self._ready = ready
        self._measure = measure
        self._recorder: Recorder | None = None
        self._tokens: TokenRecorder | None = None
        self._chooser: Chooser | None = None
        self.costs: CostTable | None = None
        self.policy = policy

    @property
    def policy(self) -> AnyPolicy:
        """The current policy. An assignment applies from the next step on, without history."""
        return self._policy

    @policy.setter
    def policy(self, policy: AnyPolicy) -> None:
        if not isinstance(policy, Policy | LearningPolicy):
            policy = parse_policy(policy, self._draft_lens)
        # isinstance of a protocol is too slow for every step, so its result is stored.
        if learning := isinstance(policy, LearningPolicy):
            policy.check(chains(self._draft_lens))
        # Tiers are timed later, between two steps: this thread may not be the one that steps.
        self._policy, self._learning, self._chooser = policy, learning, None

    def prepare(self) -> Chooser:
        """Return the chooser. The tiers are timed first if the policy needs it."""
        policy, chooser = self._policy, self._chooser
        if chooser is None:
            if isinstance(policy, LearningPolicy) and policy.uses_costs and self.costs is None:
                self.costs = self._measure()
            trees: dict[int, TreeTier] = {
                tree: TreeTier(tree.depth, tree.branches) for tree in self._draft_lens if isinstance(tree, Tree)
            }
            chooser = self._chooser = start(policy, Ladder(chains(self._draft_lens), self.costs, trees))
        return chooser

    @property
    def learns(self) -> bool:
        """Whether the policy or a recorder uses the inputs and results of steps."""
        return self._learning or self._recorder is not None

    def choose(self, rows: Sequence[Row], unread: int) -> int:
        """Return a draft length that a tier has.

        Raises:
            UnknownTier: the policy chose another one.
        """
        draft_len = self.prepare().choose(Upcoming(tuple(rows), unread))
        check_tier(draft_len, self._draft_lens)
        return draft_len

    @property
    def may_stop(self) -> bool:
        """Whether the policy may stop a drafter between two of its segments."""
        return isinstance(self.prepare(), StoppingChooser)

    def stops(self, rows: Sequence[Row], drafted: int) -> bool:
        """Whether the drafter stops, and the tier ``drafted`` runs instead of the chosen one."""
        chooser = self.prepare()
        return isinstance(chooser, StoppingChooser) and chooser.stops(Upcoming(tuple(rows)), drafted)

    @property
    def records_logits(self) -> bool:
        """Whether the trace that is being written needs the logits of steps, which only ``scored`` steps keep."""
        return self._tokens is not None and bool(self._tokens.top)

    def keep(
        self, arena: Mapping[str, torch.Tensor], rows: Sequence[Request], draft_len: int, kind: str
    ) -> tuple[TokenRecorder, list[KeptRow]] | None:
        """Copy the results of the newest run that a trace with tokens needs; None without such a trace.

        Args:
            kind: kind of the run. A run that was launched before the trace began has kept no logits for it.
        """
        tokens = self._tokens
        if tokens is None or (tokens.top and kind != "scored"):
            return None
        return tokens, [keep_row(arena, row.slot, draft_len + 1, tokens.top) for row in rows]

    def note(
        self,
        done: Done,
        offered: Sequence[int],
        rows: Sequence[Request],
        newest: Sequence[Sequence[int]],
        kept: tuple[TokenRecorder, list[KeptRow]] | None,
    ) -> None:
        """Pass on the results of a step.

        Args:
            offered: number of drafts of each row.
            newest: newest tokens of each row, those of the step first.
            kept: the result of :meth:`keep` after the run.
        """
        if self._chooser is not None:
            self._chooser.note(done)
        recorder, tokens = self._recorder, self._tokens
        if tokens is None:
            if recorder is not None:
                recorder.add(done, offered)
        # A step that was launched before the trace began has no copies.
        elif kept is not None and kept[0] is tokens:
            tokens.add(done, offered, rows, kept[1], newest)

    def record(
        self, path: str | os.PathLike[str], *, top: int | None = None, about: Mapping[str, Any] | None = None
    ) -> None:
        """Write a trace from now on. It replaces a trace that is being written.

        Args:
            top: number of likeliest tokens of a trace with tokens; None for a trace without tokens.
            about: facts about the wrap for a trace with tokens, by name.

        Raises:
            InvalidOption: a tier is a tree.
        """
        if self._draft_lens != chains(self._draft_lens):
            reason = "a tier is a tree, and policy-lab only replays chains; wrap without trees"
            raise InvalidOption(where="record_trace", name="path", value=str(path), reason=reason)
        self.end_record()
        entries = {} if top is None else about_tokens(top, about or {})
        recorder = Recorder(path, self._draft_lens, self.costs, ready=self._ready, about=entries)
        if top is not None:
            self._tokens = TokenRecorder(recorder, top)
        self._recorder = recorder

    def end_record(self) -> None:
        """End the trace that is being written, if there is one."""
        recorder, self._recorder, self._tokens = self._recorder, None, None
        if recorder is not None:
            recorder.close()
