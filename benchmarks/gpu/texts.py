"""Sequences of each tier: equal to the model's own, or where they part, and how close to a tie that was."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.budget import Figures
from speccompile import Speculator

#: Requests that draw, beside greedy ones.
DRAWN: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.9},
    "temperature, top-k, top-p": {"temperature": 0.9, "top_k": 50, "top_p": 0.9},
}


def prompts_of(vocab: int, seed: int = 1) -> list[list[int]]:
    """A random prompt, and one that repeats itself, so that lookups draft."""
    random = torch.randint(1, vocab, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [random, random[:6] * 4]


def compare_texts(spec: Speculator, vocab: int, figures: Figures, *, new_tokens: int, drawn: bool) -> None:
    """Greedy: every tier against ``model.generate`` and against K=0. With ``drawn`` also requests that draw: every tier
    against K=0, by one seed; and each tier must have run, which needs drafts. Without it, a tier that has not run is
    reported as such."""
    figures["cases"] = cases = []
    prompts = prompts_of(vocab)
    lens = spec.engine.draft_lens
    for draft_len in lens:
        spec.set_tier(draft_len)
        for reference in ("transformers", "plain") if draft_len else ("transformers",):
            before = steps_of(spec, draft_len)
            report = spec.check(prompts, max_new_tokens=new_tokens, reference=reference)  # type: ignore[arg-type]
            steps = steps_of(spec, draft_len) - before
            equal = f"{report.prompts - len(report.differences)} of {report.prompts}"
            cases.append(
                {
                    "tier": f"K={draft_len}",
                    "steps": steps,
                    "tokens": "greedy",
                    "reference": "model.generate" if reference == "transformers" else "K=0",
                    "equal": equal if steps else "not tested: nothing was drafted",
                    "first_difference": min((each.position for each in report.differences), default=None),
                    "logit_change": report.largest_logit_change,
                }
            )
    if not drawn:
        return
    for name, options in DRAWN.items():
        plain = _drawn(spec, prompts, 0, new_tokens, options)
        for draft_len in lens[1:]:
            before = steps_of(spec, draft_len)
            found = _drawn(spec, prompts, draft_len, new_tokens, options)
            parts = [_first_difference(one, other) for one, other in zip(found, plain, strict=True)]
            differing = [place for place in parts if place is not None]
            cases.append(
                {
                    "tier": f"K={draft_len}",
                    "steps": steps_of(spec, draft_len) - before,
                    "tokens": name,
                    "reference": "K=0",
                    "equal": f"{len(parts) - len(differing)} of {len(parts)}",
                    "first_difference": min(differing, default=None),
                }
            )
    if idle := [draft_len for draft_len in lens if not steps_of(spec, draft_len)]:
        raise RuntimeError(f"no step ran with K={idle[0]}: nothing was drafted")


def steps_of(spec: Speculator, draft_len: int) -> int:
    """The steps that ran with this tier: one without drafts runs with K=0, whatever tier is set."""
    return spec.stats.tier_steps.get(draft_len, 0)


def _drawn(
    spec: Speculator, prompts: list[list[int]], draft_len: int, new_tokens: int, options: dict[str, Any]
) -> list[list[int]]:
    spec.set_tier(draft_len)
    return [
        spec.engine.submit(prompt, max_new_tokens=new_tokens, do_sample=True, seed=5, eos_token_id=[], **options)
        .result()
        .token_ids
        for prompt in prompts
    ]


def _first_difference(one: list[int], other: list[int]) -> int | None:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
