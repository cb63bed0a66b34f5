"""Which prompts a benchmark runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path

from speccompile.cli.prompts import BUILT_IN, NamedPrompt, read_prompts


def choose_prompts(path: Path | None, count: int | None) -> list[NamedPrompt]:
    """``count`` prompts of ``path`` (all, if None), else the built-in ones."""
    prompts = read_prompts(path) if path else list(BUILT_IN)
    return prompts if count is None else spread(prompts, count)


def name_of(path: Path | None) -> str:
    """The file of the prompts, as a report names it: its folder belongs to one machine."""
    return path.name if path else "built in"


def spread(prompts: Sequence[NamedPrompt], count: int) -> list[NamedPrompt]:
    """The first ``count`` prompts when the categories take turns, in the order in which they first occur."""
    by_category: dict[str, list[NamedPrompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    rounds = chain.from_iterable(zip_longest(*by_category.values()))
    return [prompt for prompt in rounds if prompt is not None][:count]
