"""``forced``: a given number of drafts is accepted, right or wrong. For benchmarks: the text is garbage.

The rule corresponds to TensorRT-LLM's ``TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS`` and to vLLM's synthetic
acceptance. Here the accepted tokens are the draft tokens, and missing drafts are filled in. The sequence therefore
agrees with its KV. The numbers can also come from a recorded trace.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F

from speccompile.acceptance.base import Rule
from speccompile.acceptance.forced_tree import TreeForcedAccept, TreeForcedAcceptSampled
from speccompile.acceptance.kept_nodes import ProcessNodes
from speccompile.acceptance.lossy import Criterion, keep_passes
from speccompile.acceptance.replay import STATE, CountSteps, replayed, trace_problem, trace_state
from speccompile.errors import InvalidOption
from speccompile.graph.state import StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.graph.step_graph import StepGraph
from speccompile.ops.noise import FORCED, SEEDS, coins
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.drafts import set_drafts, useful_lens
from speccompile.utils.numbers import is_int

VARIABLE = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"


@dataclass(frozen=True)
class Forced(Rule):
    """Accept a given number of drafts in every step. Give exactly one of ``accepted``, ``rates`` and ``trace``.

    A step never accepts more drafts than the tier has, nor more than the request's token limit allows. Of a tree they
    are those of its deepest path. Runs with one
    ``seed`` accept the same numbers. The rule also accepts drafts that a request's options forbid. It refuses requests
    with a ``guide`` or a ``prefix_allowed_tokens_fn``.

    Args:
        accepted: the mean number of accepted drafts, at least 0. 2.6 accepts two drafts, and a third one in six steps
            of ten.
        rates: vLLM's per-position rates, not increasing: the first i drafts are accepted with probability ``rates[i -
            1]``.
        trace: ints of at least 0, at most ``replay.CAPACITY`` (4096) of them. Step j accepts ``trace[j]`` drafts, or
            all if it has fewer. A request's step j is its j-th step with drafts: a step without drafts (K = 0, or one
            token is left) uses no entry. After the last entry the trace starts again.
        seed: the seed of the coins, for ``accepted`` and ``rates``. A trace has no coins.
    """

    accepted: float | None = None
    rates: tuple[float, ...] | None = None
    trace: Sequence[int] | None = None
    seed: int = 0

    name: ClassVar[str] = "forced"
    lossless: ClassVar[bool] = False
    text_invariant: ClassVar[bool] = False
    fills_drafts: ClassVar[bool] = True
    breaks_guides: ClassVar[bool] = True
    judges_trees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        def refuse(name: str, reason: str) -> None:
            value = getattr(self, name)
            if name == "trace" and isinstance(value, list | tuple) and len(value) > 8:
                value = [*value[:8], ...]
            raise InvalidOption(where="acceptance 'forced'", name=name, value=value, reason=reason)

        if sum(item is not None for item in (self.accepted, self.rates, self.trace)) != 1:
            refuse("accepted", "give one of accepted, rates and trace")
        value = self.accepted
        if (value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf)) or value is True:
            refuse("accepted", "it must be a number of at least 0")
        if self.rates is not None:
            listed = isinstance(self.rates, list | tuple) and all(isinstance(rate, int | float) for rate in self.rates)
            if not listed or not self.rates or not all(a >= b >= 0 for a, b in itertools.pairwise((1.0, *self.rates))):
                refuse("rates", "they must be a list of numbers in 0 .. 1 that do not increase")
        if not is_int(self.seed) or not 0 <= self.seed < SEEDS:
            refuse("seed", f"it must be an int in 0 .. {SEEDS - 1}")
        if self.trace is not None:
            if problem := trace_problem(self.trace):
                refuse("trace", problem)
            if self.seed:
                refuse("seed", "a trace has no coins, so leave the seed out")
            # A copy: a later change of the caller's list must not affect a built step.
            object.__setattr__(self, "trace", tuple(self.trace))

    def state(self) -> list[StateSpec]:
        return [] if self.trace is None else trace_state(tuple(self.trace))

    def chances(self, count: int) -> list[float]:
        """The probabilities that at least 1, 2, ... ``count`` drafts are accepted."""
        if self.rates is not None:
            return [*self.rates, *[0.0] * count][:count]
        assert self.accepted is not None
        return [min(1.0, max(0.0, self.accepted - place)) for place in range(count)]

    def passes(self, form: StepForm) -> list[Pass]:
        criterion: Criterion = partial(forced_count, rule=self)
        state: tuple[str, ...] = ()
        if self.trace is not None:
            criterion, state = partial(replayed, period=len(self.trace)), STATE
        if form.tree is None:
            return keep_passes(criterion, form, state)
        if form.kind == "greedy":
            return [TreeForcedAccept(form.tree, criterion=criterion, state=state)]
        return [ProcessNodes(form.tree), TreeForcedAcceptSampled(form.tree, criterion=criterion, state=state)]

    def commit_passes(self) -> list[Pass]:
        return [] if self.trace is None else [CountSteps()]

    def explain(self) -> str:
        if self.trace is not None:
            wish = f"as many draft tokens as a trace of {len(self.trace)} steps has"
        elif self.rates is not None:
            wish = f"at rates {self.rates} draft tokens"
        else:
            wish = f"{self.accepted:g} draft tokens"
        return f"FOR BENCHMARKS, the text is garbage: {wish} are accepted, right or wrong"


def from_environment() -> Forced | None:
    """The rule that TensorRT-LLM's environment variable requests; None if the variable is not set, or is 0.

    Raises:
        InvalidOption: its value is not a number of at least 0.
    """
    text = os.environ.get(VARIABLE, "").strip()
    try:
        value = float(text or 0)
        if not 0 <= value < math.inf:
            raise ValueError
    except ValueError:
        reason = "it must be a number of draft tokens; 0 turns it off"
        raise InvalidOption(where="the environment", name=VARIABLE, value=text, reason=reason) from None
    return Forced(value) if value else None


def forced_count(
    scores: torch.Tensor, drafts: torch.Tensor, text: torch.Tensor, length: torch.Tensor, *, rule: Forced
) -> torch.Tensor:
    """Whether each draft is accepted, bool ``[B, K]``.

    A row has one coin in a step, for all of its drafts. It depends on the length and the newest token.
    """
    newest = text.gather(1, (length - 1).clamp(min=0)[:, None])
    coin = coins(torch.full_like(length, rule.seed), FORCED, newest, length)
    # A coin is never 0 or 1: a chance of 1 always passes, and a chance of 0 never does.
    passes = [coin < chance for chance in rule.chances(drafts.shape[1])]
    return torch.cat(passes, dim=1) if passes else torch.zeros_like(drafts, dtype=torch.bool)


@dataclass(frozen=True)
class FillDrafts(Pass):
    """Give every row ``draft_len`` drafts, or fewer near its token limit. Missing drafts are the row's newest token."""

    draft_len: int

    name: ClassVar[str] = "fill_drafts"
    looks_for: ClassVar[str] = "drafts"
    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("drafts", "rows")
    provides: ClassVar[Facts] = facts("full_drafts")

    def run(self, graph: StepGraph) -> Changes:
        state = [graph.state(name) for name in ("tokens", "length", "limit")]
        drafts = graph.values["drafts"]
        drafts._rename("proposed_drafts")
        graph.values["row_draft_lens"]._rename("proposed_lens")
        nodes = (*state, graph.values["slots"], drafts)
        set_drafts(graph, *graph.insert(fill, *nodes, before=graph.anchors.start, draft_len=self.draft_len))
        return Changes(1, f"{self.draft_len} drafts a row")


def fill(
    tokens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    *,
    draft_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts ``[B, draft_len]``, -1 after the row's token limit, and draft lengths ``[B]``."""
    row_length = length[slots]
    lens = useful_lens(torch.full_like(row_length, draft_len), row_length, limit[slots])
    newest = tokens[slots, (row_length - 1).clamp(min=0)][:, None]
    offered = torch.arange(draft_len, device=drafts.device) < lens[:, None]
    drafts = F.pad(drafts, (0, draft_len - drafts.shape[1]), value=-1)
    return torch.where(offered, torch.where(drafts < 0, newest, drafts), -1), lens
