"""Texts of wraps on a GPU, at each of their tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import speccompile
from speccompile import Speculator
from support.families import model_of, periodic
from support.tiny import greedy, random_prompt, tiny_llama

TIERS = (0, 3)
NEW = 24
#: One whose text may repeat, and one of several chunks.
PROMPTS = ([5, 6, 7] * 4, random_prompt(38, seed=2))
#: With noise that outweighs the logits a drafter draws what the target draws, whatever either has learnt.
NOISY: dict[str, Any] = {"do_sample": True, "temperature": 60.0, "top_k": 0, "seed": 3}


def wrapped(model: Any, mode: Any, **options: Any) -> Speculator:
    """Two rows of 63 tokens; the backend is the default one."""
    sizes: dict[str, Any] = {"tiers": TIERS, "max_batch": 2, "max_len": 63}
    return speccompile.wrap(model, mode, **(sizes | options))


def texts_at(
    spec: Speculator, tier: int, prompts: Sequence[list[int]] = PROMPTS, new: int = NEW, **options: Any
) -> list[list[int]]:
    """Texts of requests that run side by side at one tier; no text ends by a token."""
    spec.set_tier(tier)
    given: dict[str, Any] = {"eos_token_id": []} | options
    requests = [spec.engine.submit(prompt, max_new_tokens=new, **given) for prompt in prompts]
    return [request.result().token_ids for request in requests]


def own_texts(model: Any = None, prompts: Sequence[list[int]] = PROMPTS, new: int = NEW) -> list[list[int]]:
    """transformers' greedy texts on the CPU."""
    model = tiny_llama() if model is None else model
    return [greedy(model, prompt, new) for prompt in prompts]


def assert_texts(spec: Speculator, wanted: list[list[int]], prompts: Sequence[list[int]] = PROMPTS) -> None:
    """Greedy texts are these at every tier, and drawn ones do not depend on it."""
    assert all(texts_at(spec, tier, prompts) == wanted for tier in spec.tiers)
    drawn = [texts_at(spec, tier, prompts, **NOISY) for tier in spec.tiers]
    assert all(texts == drawn[0] for texts in drawn) and drawn[0] != wanted


def assert_family(name: str, route: str) -> None:
    """A family's greedy texts at each tier are transformers', by this route of capture."""
    model, prompts = model_of(name), (periodic(seed=2)[:38], [7, 9, 8, 30, 31, 7, 9, 8])
    wanted = own_texts(model, prompts)
    with wrapped(model.cuda(), "ngram") as spec:
        assert spec.route == route
        assert [texts_at(spec, tier, prompts) for tier in TIERS] == [wanted] * len(TIERS)
        assert spec.stats.draft_tokens > 0
