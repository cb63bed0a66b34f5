"""Decodes prompts at each tier, for what drafts are worth there and for the host's part of a step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from speccompile.graph.tree import chains, depth_of
from speccompile.policies.fixed import Fixed
from speccompile.report.data import Decoded, TraceReport
from speccompile.report.names import short_names
from speccompile.report.traces import trace_report
from speccompile.runtime.engine import Engine
from speccompile.runtime.stats import Counters
from speccompile.runtime.trace_reader import read_trace

#: New tokens of the request that a tier decodes before the others: it may find cold caches.
_WARM_UP_TOKENS = 4


def decode_at_each_tier(
    engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> tuple[dict[int, Decoded], TraceReport | None]:
    """Decode ``prompts`` greedily, one at a time, with the policy fixed to each tier; and the trace of the largest one.

    The requests are counted in the engine's statistics. The policy is as before afterwards, without its history.

    Returns:
        What was decoded, by draft length, and the trace; None where a tier is a tree.
    """
    policy, trace = engine.policy, None
    traced = engine.draft_lens == chains(engine.draft_lens)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        try:
            for draft_len in engine.draft_lens:
                engine.policy = Fixed(draft_len)
                _decode(engine, prompts[:1], min(max_new_tokens, _WARM_UP_TOKENS), draft_len, None)
                found[draft_len] = _decode(engine, prompts, max_new_tokens, draft_len, path if traced else None)
                if traced and found[draft_len].steps:
                    trace = trace_report(read_trace(path), f"{len(prompts)} prompts at K={draft_len}")
        finally:
            engine.policy = policy
    return found, trace


def _decode(
    engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int, draft_len: int, path: Path | None
) -> Decoded:
    total = Counters(engine.stats.max_draft_len)
    before = dict(engine.stats.tier_steps)
    if path is not None:
        engine.policies.record(path)
    try:
        seconds, tokens = _run(engine, prompts, max_new_tokens, total)
    finally:
        if path is not None:
            engine.policies.end_record()
    names = short_names(engine.draft_lens)
    steps = {k: count - before.get(k, 0) for k, count in engine.stats.tier_steps.items() if count > before.get(k, 0)}
    own_steps, own_length = _own(path, draft_len) if path is not None and total.row_steps else (0, None)
    return Decoded(
        prompts=len(prompts),
        tokens=total.emitted_tokens,
        steps=total.row_steps,
        acceptance_length=total.acceptance_length,
        own_steps=own_steps if path is not None else steps.get(draft_len, 0),
        own_length=own_length if path is not None else total.acceptance_length,
        tier_steps={names[k]: count for k, count in sorted(steps.items())},
        step_ms=1e3 * seconds / max(1, total.row_steps),
        tokens_per_second=tokens / seconds if seconds else 0.0,
        per_position=tuple(total.per_position[: depth_of(draft_len)]),
    )


def _run(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int, total: Counters) -> tuple[float, int]:
    """Seconds after each request's first token, and the tokens that came in them."""
    seconds, tokens = 0.0, 0
    for prompt in prompts:
        request = engine.submit(list(prompt), max_new_tokens=max_new_tokens, do_sample=False)
        started, known = 0.0, 0
        for _ in request:
            if not known:
                started, known = time.perf_counter(), len(request.new_tokens)
        seconds += time.perf_counter() - started
        tokens += len(request.new_tokens) - known
        stats = request.stats
        total.row_steps += stats.row_steps
        total.emitted_tokens += stats.emitted_tokens
        total.draft_tokens += stats.draft_tokens
        total.accepted_tokens += stats.accepted_tokens
        for position in range(total.max_draft_len):
            total.proposed_at[position] += stats.proposed_at[position]
            total.accepted_at[position] += stats.accepted_at[position]
    return seconds, tokens


def _own(path: Path, draft_len: int) -> tuple[int, float | None]:
    """Steps of the tier itself, and their acceptance length: where no row has drafts, a smaller tier runs."""
    own = [step for step in read_trace(path).steps if step.draft_len == draft_len]
    rows = sum(len(step.requests) for step in own)
    return len(own), sum(sum(step.emitted) for step in own) / rows if rows else None
