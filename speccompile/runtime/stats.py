"""What speculation did, counted in draft tokens, emitted tokens and passes."""

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
    """How many values lie in each range that ends at one of ``bounds``, those above the last, and the sum of all."""

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
        """One step of a row; ``depth`` of the deepest draft of a tree, whose nodes share positions, None of a chain."""
        self.row_steps += 1
        self.emitted_tokens += emitted
        self.draft_tokens += proposed
        self.accepted_tokens += accepted
        for position in range(proposed if depth is None else min(proposed, depth)):
            self.proposed_at[position] += 1
            self.accepted_at[position] += position < accepted

    @property
    def rejected_tokens(self) -> int:
        """Drafts that the target read for nothing."""
        return self.draft_tokens - self.accepted_tokens

    @property
    def acceptance_length(self) -> float:
        """Mean emitted tokens n per live row and target pass; 0.0 before the first step."""
        return self.emitted_tokens / self.row_steps if self.row_steps else 0.0

    @property
    def per_position(self) -> list[float]:
        """Share of the drafts offered at each position that were accepted; 0.0 where none was offered."""
        pairs = zip(self.accepted_at, self.proposed_at, strict=True)
        return [accepted / proposed if proposed else 0.0 for accepted, proposed in pairs]


@dataclass
class RequestStats(Counters):
    """One request.

    ``finish_reason`` is ``eos``, ``stop``, ``max_new_tokens``, ``max_len``, ``cancelled`` or ``error``; empty until it
    has ended. Of its prompt's tokens, ``prefill_tokens`` were read, and the KV of ``reused_tokens`` was there already;
    where that is all but the last, the first decode step of its own reads the last. The KV of ``reread_tokens`` was
    there too, but no recurrent state at their end: they are among those that were read. ``drafts_by`` counts draft
    tokens, and those of them that were accepted, by the drafter's place in ``Mode.drafter_names``.
    """

    prompt_tokens: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    reread_tokens: int = 0
    new_tokens: int = 0
    finish_reason: str = ""
    drafts_by: dict[int, tuple[int, int]] = field(default_factory=dict)

    def count_drafts(self, source: int, accepted: int, proposed: int) -> None:
        """One step's draft tokens, of the drafter ``source``."""
        drafts, right = self.drafts_by.get(source, (0, 0))
        self.drafts_by[source] = drafts + proposed, right + accepted


@dataclass
class Stats(Counters):
    """Everything since ``wrap`` or :meth:`reset`.

    ``steps`` counts runs of a tier, each one target pass over all rows, so it equals ``target_passes`` for drafts in a
    chain; prefill is counted apart. ``requests`` are those of the newest call of ``generate``. ``tier_steps`` counts
    steps by draft length, ``rows_steps`` by the row count of the executable; ``tier_seconds`` are what those
    took, launch and results. ``no_proposal_steps`` counts steps of any tier in which no row had a draft.
    ``prompt_tokens`` are those of all prompts that have received a slot. ``prefill_tokens`` are those read in
    ``prefill_passes`` and along with decode steps. ``reused_tokens`` and ``reread_tokens`` are those of all requests. A
    last token that a request's own first decode step reads is in ``prompt_tokens`` only.
    ``request_shares[j]`` are the ended requests that had a draft at position j, by the share of these that was
    accepted: so many in each range that ends at one of :data:`SHARES`; ``request_share_sums[j]`` are these shares' sum.
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
        # Emitted and prompt tokens of all steps that are counted in ``step_tokens``.
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
        """One run of a tier; ``proposed`` if any row had a draft."""
        self.steps += 1
        self.no_proposal_steps += not proposed
        self.target_passes += 1
        self.tier_steps[draft_len] = self.tier_steps.get(draft_len, 0) + 1
        self.rows_steps[rows] = self.rows_steps.get(rows, 0) + 1

    def count_step_tokens(self) -> None:
        """The rows of a step have been counted, and the prompts that were read before it."""
        tokens = self.emitted_tokens + self.prefill_tokens
        self.step_tokens.count(tokens - self._counted_tokens)
        self._counted_tokens = tokens

    def count_seconds(self, draft_len: int, seconds: float) -> None:
        """The time of one run of a tier."""
        self.tier_seconds[draft_len] = self.tier_seconds.get(draft_len, 0.0) + seconds

    def count_tokens(self, tokens: int, seconds: float, *, first: bool) -> None:
        """A request got ``tokens`` new tokens, ``seconds`` after its newest one, or ``first`` ones after ``submit``."""
        if first:
            self.first_token_seconds.count(seconds)
            self.between_tokens_seconds.count(0.0, tokens - 1)
        else:
            self.between_tokens_seconds.count(seconds / tokens, tokens)

    def count_request(self, request: RequestStats) -> None:
        """A request has ended."""
        self.ended_requests += 1
        for position, (share, proposed) in enumerate(zip(request.per_position, request.proposed_at, strict=True)):
            if proposed:
                self.request_shares[position][next(i for i, bound in enumerate(SHARES) if share <= bound)] += 1
                self.request_share_sums[position] += share

    def count_prefill(self, tokens: int) -> None:
        """One run over ``tokens`` prompt tokens."""
        self.prefill_passes += 1
        self.prefill_tokens += tokens
