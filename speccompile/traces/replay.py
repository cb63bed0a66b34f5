"""Replay of a drafter over a trace with tokens, without the model.

Where the target's tokens do not depend on drafts, a step accepts exactly the drafts that are equal to the recorded
tokens. The replay of a drafter that only reads tokens is thus the run itself, step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speccompile.errors import InvalidOption
from speccompile.modes import Mode, create
from speccompile.policies.costs import CostTable
from speccompile.traces.drafting import TracedDrafter, drafter_of
from speccompile.traces.reader import TokenTrace, TracedRequest
from speccompile.utils.numbers import is_int


@dataclass(frozen=True)
class ReplayedRequest:
    """The steps of a request, one entry each.

    Args:
        number: its number in the trace.
        contexts: tokens before each step.
        proposed, accepted, emitted: numbers of judged drafts, of accepted drafts, and of emitted tokens.
    """

    number: int
    contexts: tuple[int, ...]
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    """Result of a replay.

    Args:
        milliseconds: the time that the steps need by the costs; None without costs.
    """

    requests: tuple[ReplayedRequest, ...]
    milliseconds: float | None

    @property
    def steps(self) -> int:
        """Number of steps."""
        return sum(len(request.emitted) for request in self.requests)

    @property
    def tokens(self) -> int:
        """Number of tokens that the steps emit."""
        return sum(sum(request.emitted) for request in self.requests)

    @property
    def acceptance_length(self) -> float:
        """Mean emitted tokens per step; 0.0 without steps."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Predicted speed of the steps; None without costs."""
        return 1e3 * self.tokens / self.milliseconds if self.milliseconds else None


def replay(
    trace: TokenTrace,
    mode: str | Sequence[str] | Mode,
    *,
    draft_len: int,
    costs: CostTable | None = None,
    **options: Any,
) -> Replay:
    """Replay a drafter that only reads tokens: ``ngram``, ``suffix``, ``prediction``, compositions of these, and your
    own (``user_provided``, a :class:`~speccompile.modes.ReadyMode`).

    The steps are those of ``wrap(model, mode, tiers=(0, draft_len), policy="fixed:K")`` that decodes the requests one
    after another. Greedy output is replayed exactly, and so is drawn output of a rule that does not let tokens depend
    on drafts, such as ``exact``. Requests with a guide are not: its forced tokens are drafts, too.

    Args:
        trace: tokens of the target, recorded with any drafter, or with none.
        mode: a mode, or the arguments of ``wrap``: a name, or several names.
        draft_len: K.
        costs: costs of steps, by which a speed is predicted. They may be those of another machine. None predicts none;
            ``trace.costs`` are those of the recorded run.
        options: options of the mode.

    Raises:
        InvalidOption: the mode reads more than tokens, an option is not valid, or ``costs`` lack the draft lengths.
        UserError: the mode does not exist, or does not accept the options.
        DraftFailed: a drafter on the host raised an error.
    """

    def refuse(name: str, value: Any, reason: str) -> InvalidOption:
        return InvalidOption(where="replay", name=name, value=value, reason=reason)

    if not is_int(draft_len) or draft_len < 1:
        raise refuse("draft_len", draft_len, "it must be an int >= 1")
    if not isinstance(mode, Mode):
        created = create(mode, options, others=("draft_len", "costs"))
        if not isinstance(created, Mode):
            raise refuse("mode", mode, "it chooses a drafter by the model; give the drafter")
        mode = created
    elif options:
        raise refuse("options", options, "the mode is created already; give its options to its class")
    if costs is not None and not {0, draft_len} <= set(costs.draft_lens):
        reason = f"they must have steps of K=0 and K={draft_len}, and have K={', '.join(map(str, costs.draft_lens))}"
        raise refuse("costs", costs, reason)
    if not trace.text_invariant:
        for request in trace.requests:
            if not request.greedy:
                reason = f"request {request.number} draws tokens by a rule that lets them depend on drafts"
                raise refuse("trace", request.number, f"{reason}; record with acceptance='exact', or without drafts")
    drafter = drafter_of(mode, trace, draft_len)
    requests = tuple(_replayed(drafter, request, trace.max_len) for request in trace.requests)
    return Replay(requests, None if costs is None else sum(_milliseconds(own, costs) for own in requests))


def _replayed(drafter: TracedDrafter, request: TracedRequest, max_len: int) -> ReplayedRequest:
    text = [*request.prompt, *request.tokens]
    limit = min(len(request.prompt) + request.max_new_tokens, max_len)
    length = len(request.prompt) + request.before_steps
    steps: list[tuple[int, int, int, int]] = []
    drafter.begin(request)
    while length < len(text):
        drafts = drafter.drafts(text[:length], limit)[: request.num_draft_tokens]
        left = text[length:]
        right = next(
            (i for i, (a, b) in enumerate(zip(drafts, left, strict=False)) if a != b), min(len(drafts), len(left))
        )
        # An accepted EOS token ends the request without a further token.
        emitted = min(right + 1, len(left))
        steps.append((length, len(drafts), right, emitted))
        length += emitted
    drafter.end(text, limit)
    columns = zip(*steps, strict=True) if steps else ((),) * 4
    return ReplayedRequest(request.number, *map(tuple, columns))


def _milliseconds(request: ReplayedRequest, costs: CostTable) -> float:
    """The time of the steps. Drafts that are fewer than K run the smallest tier that holds them."""
    return sum(
        costs.ms(1, min(k for k in costs.draft_lens if k >= proposed), context)
        for context, proposed in zip(request.contexts, request.proposed, strict=True)
    )
