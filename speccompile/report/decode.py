"""Decodes prompts at each tier to measure acceptance and the host's part of a step."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from speccompile.graph.tree import chains, depth_of
from speccompile.policies.fixed import Fixed
from speccompile.report.names import short_names
from speccompile.report.run_data import Decoded, TraceReport
from speccompile.report.traces import trace_report
from speccompile.runtime.engine import Engine
from speccompile.runtime.stats import Counters
from speccompile.runtime.trace_reader import RecordedRun, read_trace

#: New tokens of the first request of a tier, whose time is not counted: caches may be cold.
_WARM_UP_TOKENS = 4


def decode_at_each_tier(
    engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> tuple[dict[int, Decoded], TraceReport | None]:
    """Decode ``prompts`` greedily, one at a time, with the policy fixed to each tier.

    Each prompt is decoded at all tiers before the next one, and the first tier rotates. A temporary slowdown of the
    machine then affects all tiers. The engine's statistics include these requests. Afterwards the policy is restored
    without its history.

    Returns:
        The decoded results by draft length, and the trace of the largest tier; no trace (None) if a tier is a tree.
    """
    policy, tiers = engine.policy, engine.draft_lens
    traced = tiers == chains(tiers)
    tallies = {draft_len: _Tally(engine.stats.max_draft_len) for draft_len in tiers}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl") if traced else None
        try:
            for draft_len in tiers:
                engine.policy = Fixed(draft_len)
                warm_up = _Tally(engine.stats.max_draft_len)
                _decode(engine, prompts[0], min(max_new_tokens, _WARM_UP_TOKENS), warm_up, None)
            for turn, prompt in enumerate(prompts):
                first = turn % len(tiers)
                for draft_len in (*tiers[first:], *tiers[:first]):
                    engine.policy = Fixed(draft_len)
                    _decode(engine, prompt, max_new_tokens, tallies[draft_len], path)
        finally:
            engine.policy = policy
    names = short_names(tiers)
    found = {draft_len: _decoded(draft_len, tally, len(prompts), names) for draft_len, tally in tallies.items()}
    traces = tallies[tiers[-1]].traces
    if not traces or not found[tiers[-1]].steps:
        return found, None
    steps = tuple(step for trace in traces for step in trace.steps)
    return found, trace_report(replace(traces[0], steps=steps), f"{len(prompts)} prompts at K={tiers[-1]}")


@dataclass
class _Tally:
    """Results of one tier so far. ``seconds`` and ``tokens`` exclude the first token of each request."""

    max_draft_len: int
    seconds: float = 0.0
    tokens: int = 0
    tier_steps: Counter[int] = field(default_factory=Counter)
    traces: list[RecordedRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.total = Counters(self.max_draft_len)


def _decode(engine: Engine, prompt: Sequence[int], max_new_tokens: int, tally: _Tally, path: Path | None) -> None:
    before = dict(engine.stats.tier_steps)
    if path is not None:
        engine.policies.record(path)
    try:
        request = engine.submit(list(prompt), max_new_tokens=max_new_tokens, do_sample=False)
        started, known = 0.0, 0
        for _ in request:
            if not known:
                started, known = time.perf_counter(), len(request.new_tokens)
    finally:
        if path is not None:
            engine.policies.end_record()
    tally.seconds += time.perf_counter() - started
    tally.tokens += len(request.new_tokens) - known
    stats, total = request.stats, tally.total
    total.row_steps += stats.row_steps
    total.emitted_tokens += stats.emitted_tokens
    total.draft_tokens += stats.draft_tokens
    total.accepted_tokens += stats.accepted_tokens
    for position in range(total.max_draft_len):
        total.proposed_at[position] += stats.proposed_at[position]
        total.accepted_at[position] += stats.accepted_at[position]
    tally.tier_steps.update({k: count - before.get(k, 0) for k, count in engine.stats.tier_steps.items()})
    if path is not None and stats.row_steps:
        tally.traces.append(read_trace(path))


def _decoded(draft_len: int, tally: _Tally, prompts: int, names: Mapping[int, str]) -> Decoded:
    total, seconds = tally.total, tally.seconds
    own_steps: int = tally.tier_steps[draft_len]
    own_length = total.acceptance_length if total.row_steps else None
    if tally.traces:
        own_steps, own_length = _own(tally.traces, draft_len)
    return Decoded(
        prompts=prompts,
        tokens=total.emitted_tokens,
        steps=total.row_steps,
        acceptance_length=total.acceptance_length,
        own_steps=own_steps,
        own_length=own_length,
        tier_steps={names[k]: count for k, count in sorted(tally.tier_steps.items()) if count},
        step_ms=1e3 * seconds / max(1, total.row_steps),
        tokens_per_second=tally.tokens / seconds if seconds else 0.0,
        per_position=tuple(total.per_position[: depth_of(draft_len)]),
    )


def _own(traces: Sequence[RecordedRun], draft_len: int) -> tuple[int, float | None]:
    """Steps of the tier itself, and their acceptance length. A smaller tier runs if no row has drafts."""
    own = [step for trace in traces for step in trace.steps if step.draft_len == draft_len]
    rows = sum(len(step.requests) for step in own)
    return len(own), sum(sum(step.emitted) for step in own) / rows if rows else None
