"""What a speculator writes while each of its steps runs another shape of drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from speccompile import Speculator


def texts_by_shapes(
    spec: Speculator,
    prompts: Sequence[list[int]],
    lengths: Sequence[int],
    shapes: tuple[int, ...],
    seed: int,
    **options: Any,
) -> list[list[int]]:
    """All prompts side by side, so many new tokens each; with ``options`` each has its own seed."""
    rng = random.Random(seed)
    requests = [
        spec.engine.submit(prompt, max_new_tokens=length, seed=row if options else None, **options)
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    while not all(request.finished for request in requests):
        spec.set_tier(rng.choice(shapes))
        spec.engine.step()
    return [request.result().token_ids for request in requests]


def counts_by_shape(
    spec: Speculator, prompts: Sequence[list[int]], length: int, shape: int, **options: Any
) -> list[int]:
    """Accepted and proposed draft tokens, and target passes.

    Prompts come one by one: beside one that is being read, the time a step takes decides how much is drafted. Each has
    been read before: the first token of a known prompt is a step's, that of another one its prefill's.
    """
    spec.set_tier(shape)
    counts = [0, 0, 0]
    for row, prompt in enumerate(prompts):
        spec.engine.submit(prompt, max_new_tokens=1).result()
        spec.stats.reset()
        spec.engine.submit(prompt, max_new_tokens=length, seed=row if options else None, **options).result()
        stats = spec.stats
        of_prompt = (stats.accepted_tokens, stats.draft_tokens, stats.target_passes)
        counts = [count + more for count, more in zip(counts, of_prompt, strict=True)]
    return counts
