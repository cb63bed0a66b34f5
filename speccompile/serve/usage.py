"""Statistics in a response: token counts, and results of speculation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from openai.types.completion_usage import CompletionTokensDetails, CompletionUsage, PromptTokensDetails

from speccompile.runtime.request import Request
from speccompile.runtime.stats import RequestStats


def usage_of(
    requests: Sequence[Request], new_tokens: Sequence[int], choices: int, *, predicted_by: int | None
) -> CompletionUsage:
    """Usage of the requests of one response, with ``choices`` for each prompt. A prompt is counted once.

    Args:
        new_tokens: for each request, the number of tokens that the client has received.
        predicted_by: index in ``Mode.drafter_names`` of the drafter of the requests' predictions; None without
            predictions.
    """
    firsts = requests[::choices]
    prompt = sum(len(request.prompt) for request in firsts)
    new = sum(new_tokens)
    cached = sum(request.stats.reused_tokens for request in firsts)
    usage = CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=new,
        total_tokens=prompt + new,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )
    if predicted_by is not None:
        # The engine may be ahead of the client by some tokens.
        accepted = sum(
            request.drafted_by[:count].count(predicted_by) for request, count in zip(requests, new_tokens, strict=True)
        )
        counts = [request.stats.drafts_by.get(predicted_by, (0, 0)) for request in requests]
        usage.completion_tokens_details = CompletionTokensDetails(
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=sum(drafts - right for drafts, right in counts),
        )
    return usage


def speculation_of(requests: Sequence[Request]) -> dict[str, Any]:
    """Field ``metrics`` of a response.

    Names and meanings are vLLM's (``--per-request-spec-decode-metrics``, docs/features/speculative_decoding/
    acceptance_metrics.md). Its verification steps are steps with a draft: ``mean_acceptance_length`` is 1 + accepted
    drafts / such steps, or 1.0 without any. Additional names are this package's: ``acceptance_length`` is the mean
    number of emitted tokens over all steps, with or without a draft. ``proposed_at`` and ``accepted_at`` are the judged
    and the accepted draft tokens by position.
    """
    stats = [request.stats for request in requests]
    steps, emitted = sum(item.row_steps for item in stats), sum(item.emitted_tokens for item in stats)
    drafts, accepted = sum(item.draft_tokens for item in stats), sum(item.accepted_tokens for item in stats)
    proposed_at, accepted_at = _by_position(stats, "proposed_at"), _by_position(stats, "accepted_at")
    # Steps with drafts, by the number of accepted drafts.
    drafted = proposed_at[0] if proposed_at else 0
    at_least = [drafted, *accepted_at, 0]
    histogram = [more - less for more, less in pairwise(at_least)]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / drafted if drafted else 1.0,
            "draft_acceptance_rate": accepted / drafts if drafts else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": drafted,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafts,
            "num_spec_tokens": len(proposed_at),
            "acceptance_length": emitted / steps if steps else 0.0,
            "proposed_at": proposed_at,
            "accepted_at": accepted_at,
        }
    }


def _by_position(stats: Sequence[RequestStats], name: str) -> list[int]:
    """Sums over the requests, by position."""
    return [sum(counts) for counts in zip(*(getattr(item, name) for item in stats), strict=True)]
