"""What a response says about itself: token counts, and what speculation did."""

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
    """Of the requests of one response, ``choices`` of each prompt. A prompt counts once.

    Args:
        new_tokens: of each request, those that the client has received.
        predicted_by: the drafter of the requests' predictions, by its place in ``Mode.drafter_names``; None if they
            have none.
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
        # The engine may have more tokens by now than the client.
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
    """``metrics`` of a response.

    Names and meanings are vLLM's (``--per-request-spec-decode-metrics``, docs/features/speculative_decoding/
    acceptance_metrics.md), whose verification steps are those with a draft: ``mean_acceptance_length`` is 1 + accepted
    drafts / such steps, 1.0 without any. The other names are this package's: ``acceptance_length`` is the mean number
    of emitted tokens over all steps, those without a draft included; ``proposed_at`` and ``accepted_at`` are draft
    tokens by position, those that the target judged and those that it accepted.
    """
    stats = [request.stats for request in requests]
    steps, emitted = sum(item.row_steps for item in stats), sum(item.emitted_tokens for item in stats)
    drafts, accepted = sum(item.draft_tokens for item in stats), sum(item.accepted_tokens for item in stats)
    proposed_at, accepted_at = _by_position(stats, "proposed_at"), _by_position(stats, "accepted_at")
    # Steps by the number of accepted drafts, of those in which anything was drafted.
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
    """Sums over the requests."""
    return [sum(counts) for counts in zip(*(getattr(item, name) for item in stats), strict=True)]
