"""Statistics of speculation, counted in draft tokens, emitted tokens and passes."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

#: Upper bounds of the histograms of requests' accepted shares.
SHARES = tuple(tenth / 10 for tenth in range(11))
#: Upper bounds of the histograms of latencies, in seconds.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
#: Upper bounds of the histogram of tokens of a step.
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))


@dataclass
class Histogram:
    """Number of values in each range that ends at one of ``bounds``, number of those above, and sum of all values."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def count(self, value: float, times: int = 1) -> None:
        """Add ``value``, ``times`` times."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += times * value


@dataclass
class Counters:
    """Counts over live rows and steps. ``proposed_at[j]`` and ``accepted_at[j]`` are per draft position."""

    max_draft_len: int
    row_steps: int = 0
    emitted_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    proposed_at: list[int] = field(init=False)
    accepted_at: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.proposed_at = [0] * self.max_draft_len
        self.accepted_at = [0] * self.max_draft_len

    def count(self, emitted: int, accepted: int, proposed: int, depth: int | None = None) -> None:
        """Count one step of a row. ``depth`` is that of the deepest draft of a tree, whose nodes share positions; None
        for a chain."""
        self.row_steps += 1
        self.emitted_tokens += emitted
        self.draft_tokens += proposed
        self.accepted_tokens += accepted
        for position in range(proposed if depth is None else min(proposed, depth)):
            self.proposed_at[position] += 1
            self.accepted_at[position] += position < accepted

    @property
    def rejected_tokens(self) -> int:
        """Drafts that the target processed but did not accept."""
        return self.draft_tokens - self.accepted_tokens

    @property
    def acceptance_length(self) -> float:
        """Mean emitted tokens n per live row and target pass; 0.0 before the first step."""
        return self.emitted_tokens / self.row_steps if self.row_steps else 0.0

    @property
    def per_position(self) -> list[float]:
        """Share of accepted drafts among those offered at each position; 0.0 if none was offered."""
        pairs = zip(self.accepted_at, self.proposed_at, strict=True)
        return [accepted / proposed if proposed else 0.0 for accepted, proposed in pairs]


#: The source of drafts that a guide forces, beside the indices of drafters.
GUIDE_SOURCE = -1


@dataclass
class RequestStats(Counters):
    """Counts of one request.

    ``finish_reason`` is ``eos``, ``stop``, ``max_new_tokens``, ``max_len``, ``cancelled`` or ``error``; empty until the
    request has ended. Of its prompt's tokens, ``prefill_tokens`` were processed, and the KV of ``reused_tokens`` was
    known. If all but the last were known, the request's own first decode step processes the last. The KV of
    ``reread_tokens`` was also known, but no recurrent state at their end: these are counted as processed. ``drafts_by``
    counts draft tokens and accepted draft tokens, by the drafter's index in ``Mode.drafter_names``, or by
    ``GUIDE_SOURCE`` for tokens that a guide forces.
    """

    prompt_tokens: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    reread_tokens: int = 0
    new_tokens: int = 0
    finish_reason: str = ""
    drafts_by: dict[int, tuple[int, int]] = field(default_factory=dict)

    def count_drafts(self, source: int, accepted: int, proposed: int) -> None:
        """Count one step's draft tokens of the drafter ``source``."""
        drafts, right = self.drafts_by.get(source, (0, 0))
        self.drafts_by[source] = drafts + proposed, right + accepted


@dataclass
class Stats(Counters):
    """Counts of all requests since ``wrap`` or :meth:`reset`.

    ``steps`` counts runs of a tier, each one target pass over all rows, so it equals ``target_passes`` for drafts in a
    chain. Prefill is counted separately. ``requests`` are those of the newest call of ``generate``. ``tier_steps``
    counts steps by draft length, ``rows_steps`` by the row count of the executable. ``tier_seconds`` has the time of
    these steps, launch and results included. ``no_proposal_steps`` counts steps of any tier in which no row had a
    draft.

    ``prompt_tokens`` counts the tokens of all prompts that have received a slot. ``prefill_tokens`` counts those that
    were processed, in ``prefill_passes`` and along with decode steps. ``reused_tokens`` and ``reread_tokens`` are sums
    over all requests. A last token that a request's own first decode step processes is only in ``prompt_tokens``.
    ``preemptions`` counts requests that gave their pages of KV to another one, to be read again later; their tokens are
    then in ``reread_tokens``.

    ``request_shares[j]`` counts the ended requests that had a draft at position j, by the share of these drafts that
    was accepted: the number in each range that ends at one of :data:`SHARES`. ``request_share_sums[j]`` is the sum of
    these shares.

    ``step_tokens`` has the tokens of each step: emitted ones, and those of prompts since the step before.
    ``first_token_seconds`` has the time from ``submit`` to the first token of each request, ``between_tokens_seconds``
    the time before each further token. Tokens of one step arrive together and share the time since the step before.
    """

    steps: int = 0
    no_proposal_steps: int = 0
    target_passes: int = 0
    prompt_tokens: int = 0
    prefill_passes: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    reread_tokens: int = 0
    preemptions: int = 0
    tier_steps: dict[int, int] = field(default_factory=dict)
    rows_steps: dict[int, int] = field(default_factory=dict)
    tier_seconds: dict[int, float] = field(default_factory=dict)
    requests: list[RequestStats] = field(default_factory=list)
    ended_requests: int = 0
    request_shares: list[list[int]] = field(init=False)
    request_share_sums: list[float] = field(init=False)
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))
    first_token_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    between_tokens_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))

    def __post_init__(self) -> None:
        super().__post_init__()
        # Emitted and prompt tokens of all steps that ``step_tokens`` has counted.
        self._counted_tokens = 0
        self.request_shares = [[0] * len(SHARES) for _ in range(self.max_draft_len)]
        self.request_share_sums = [0.0] * self.max_draft_len

    @property
    def tier_residency(self) -> dict[int, float]:
        """Share of the steps that each tier ran, by draft length."""
        return {draft_len: count / self.steps for draft_len, count in sorted(self.tier_steps.items())}

    def reset(self) -> None:
        """Set all counts and times to zero."""
        self.__init__(self.max_draft_len)  # type: ignore[misc]

    def count_step(self, draft_len: int, rows: int, *, proposed: bool) -> None:
        """Count one run of a tier; ``proposed`` if any row had a draft."""
        self.steps += 1
        self.no_proposal_steps += not proposed
        self.target_passes += 1
        self.tier_steps[draft_len] = self.tier_steps.get(draft_len, 0) + 1
        self.rows_steps[rows] = self.rows_steps.get(rows, 0) + 1

    def count_step_tokens(self) -> None:
        """Count the tokens of a step, whose rows and earlier prompts have been counted."""
        tokens = self.emitted_tokens + self.prefill_tokens
        self.step_tokens.count(tokens - self._counted_tokens)
        self._counted_tokens = tokens

    def count_seconds(self, draft_len: int, seconds: float) -> None:
        """Add the time of one run of a tier."""
        self.tier_seconds[draft_len] = self.tier_seconds.get(draft_len, 0.0) + seconds

    def count_tokens(self, tokens: int, seconds: float, *, first: bool) -> None:
        """Count ``tokens`` new tokens, which came ``seconds`` after the request's newest one, or, if they are its
        ``first`` ones, after ``submit``."""
        if first:
            self.first_token_seconds.count(seconds)
            self.between_tokens_seconds.count(0.0, tokens - 1)
        else:
            self.between_tokens_seconds.count(seconds / tokens, tokens)

    def count_request(self, request: RequestStats) -> None:
        """Count a request that has ended."""
        self.ended_requests += 1
        for position, (share, proposed) in enumerate(zip(request.per_position, request.proposed_at, strict=True)):
            if proposed:
                self.request_shares[position][next(i for i, bound in enumerate(SHARES) if share <= bound)] += 1
                self.request_share_sums[position] += share

    def count_prefill(self, tokens: int) -> None:
        """Count one run over ``tokens`` prompt tokens."""
        self.prefill_passes += 1
        self.prefill_tokens += tokens
