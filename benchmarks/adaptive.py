"""Does a policy that adapts lose to the best fixed tier? Prompts of all kinds in random order, every way in turns.

``python -m benchmarks.adaptive --prompts FILE``; see README.md beside this file.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.prompts import name_of
from benchmarks.serving import fitting_prompts
from speccompile import Speculator, Tree, modes, wrap
from speccompile.cli.models import load
from speccompile.cli.session import parse_options, parse_tiers, session
from speccompile.errors import InvalidOption
from speccompile.policies import Chooser, Fixed, Ladder, LearningPolicy, parse_policy
from speccompile.policies.base import AnyPolicy
from speccompile.utils.progress import task

PIPED_WIDTH = 140


class Continued:
    """A policy that continues with its chooser, and what that has learned, when it is set again."""

    def __init__(self, policy: LearningPolicy) -> None:
        self._policy = policy
        self._chooser: Chooser | None = None

    def __str__(self) -> str:
        return str(self._policy)

    @property
    def uses_costs(self) -> bool:
        return self._policy.uses_costs

    def check(self, draft_lens: Collection[int]) -> None:
        self._policy.check(draft_lens)

    def start(self, ladder: Ladder) -> Chooser:
        self._chooser = self._chooser or self._policy.start(ladder)
        return self._chooser


@dataclass
class Contender:
    """A policy and its results over all prompts: ``seconds`` after the first token of each, and the tokens in them."""

    name: str
    policy: AnyPolicy
    tokens: int = 0
    seconds: float = 0.0
    steps: Counter[int] = field(default_factory=Counter)
    by_category: dict[str, tuple[int, float]] = field(default_factory=dict)
    #: Tokens in a second of each round that has ended.
    rounds: list[float] = field(default_factory=list)
    _before: tuple[int, float] = (0, 0.0)

    @property
    def speed(self) -> float:
        """Tokens in a second, of the median round."""
        return statistics.median(self.rounds)

    def end_round(self) -> None:
        tokens, seconds = self._before
        self.rounds.append((self.tokens - tokens) / (self.seconds - seconds))
        self._before = self.tokens, self.seconds

    def note(self, category: str, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        before = self.by_category.get(category, (0, 0.0))
        self.by_category[category] = (before[0] + tokens, before[1] + seconds)


def fixed_name(draft_len: int) -> str:
    if isinstance(draft_len, Tree):
        return f"tree:{int(draft_len)},{draft_len.depth},{draft_len.branches}"
    return f"fixed:{draft_len}" if draft_len else "none"


def parse_tree(text: str) -> Tree:
    try:
        nodes, depth, branches = map(int, text.split(","))
    except ValueError:
        reason = "write nodes, depth and branches of a dynamic tree as 7,4,4"
        raise InvalidOption(where="the command line", name="--tree", value=text, reason=reason) from None
    return Tree.dynamic(nodes, depth, branches)


def ways(draft_lens: Sequence[int], adaptive: Sequence[str]) -> list[Contender]:
    """Every fixed tier, none among them, and the policies that adapt."""
    fixed = [Contender(fixed_name(draft_len), Fixed(draft_len)) for draft_len in draft_lens]
    learning = []
    for text in adaptive:
        policy = parse_policy(text, draft_lens)
        if not isinstance(policy, LearningPolicy):
            reason = "it does not adapt; every fixed tier is there already"
            raise InvalidOption(where="the command line", name="--policy", value=text, reason=reason)
        learning.append(Contender(text, Continued(policy)))
    return fixed + learning


def run(
    spec: Speculator, contenders: Sequence[Contender], prompts: Sequence[tuple[str, list[int]]], new_tokens: int
) -> list[str]:
    """Each prompt (its category and ids) by all, before the next one; who goes first rotates.

    Returns:
        Of each text that differs from the first one's, whose it is and of which prompt.
    """
    different = []
    for index, (category, ids) in enumerate(prompts):
        texts = {}
        for way in [*contenders[index % len(contenders) :], *contenders[: index % len(contenders)]]:
            spec.engine.policy = way.policy
            spec.stats.reset()
            result = spec.engine.submit(ids, max_new_tokens=new_tokens).result()
            texts[way.name] = result.token_ids
            way.steps.update(spec.stats.tier_steps)
            if len(result.token_ids) > 1:
                assert result.timings.first_token is not None
                seconds = result.timings.total - result.timings.first_token
                way.note(category, len(result.token_ids) - 1, seconds)
        reference = texts[contenders[0].name]
        different += [f"{name}, prompt {index}" for name, text in texts.items() if text != reference]
    return different


def warm_up(spec: Speculator, contenders: Sequence[Contender], ids: list[int]) -> None:
    """Tiers are timed, and each has run; no policy has learned anything from it."""
    for draft_len in spec.engine.draft_lens:
        spec.engine.policy = Fixed(draft_len)
        spec.engine.submit(ids, max_new_tokens=8).result()
    for way in contenders:
        spec.engine.policy = way.policy
        spec.engine.policies.prepare()


def report(contenders: Sequence[Contender], different: Sequence[str]) -> dict[str, Any]:
    best = max((way for way in contenders if isinstance(way.policy, Fixed)), key=lambda way: way.speed)
    rows = [
        {
            "way": way.name,
            "decode_tokens_per_second": way.speed,
            "ratio_to_the_best_fixed": way.speed / best.speed,
            "rounds": way.rounds,
            "steps_by_tier": {
                fixed_name(tier).removeprefix("fixed:"): count / way.steps.total()
                for tier, count in sorted(way.steps.items())
            },
            "categories": {name: tokens / seconds for name, (tokens, seconds) in way.by_category.items()},
        }
        for way in contenders
    ]
    return {"best_fixed": best.name, "ways": rows, "different_texts": list(different)}


def tables(report: dict[str, Any]) -> list[Table]:
    whole = Table(title=f"after first tokens; the best fixed one is {report['best_fixed']}", title_justify="left")
    whole.add_column("")
    for heading in ("tokens/s", "to the best fixed", "steps by tier"):
        whole.add_column(heading, justify="right")
    kinds = Table(title="tokens/s by category", title_justify="left")
    kinds.add_column("")
    categories = list(report["ways"][0]["categories"])
    for category in categories:
        kinds.add_column(category, justify="right")
    for row in report["ways"]:
        steps = ", ".join(f"{key}: {share:.0%}" for key, share in row["steps_by_tier"].items())
        speed, ratio = row["decode_tokens_per_second"], row["ratio_to_the_best_fixed"]
        whole.add_row(row["way"], f"{speed:.1f}", f"{ratio:.3f}x", steps)
        kinds.add_row(row["way"], *[f"{row['categories'].get(category, 0.0):.1f}" for category in categories])
    return [whole, kinds]


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's or HumanEval's JSON lines, also .gz.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="So many prompts, spread over the categories.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most new tokens a prompt.")] = 96,
    seed: Annotated[int, typer.Option(help="Of the order of the prompts.")] = 0,
    mode: Annotated[str, typer.Option(help=f"How to draft: {', '.join(modes.available())}.")] = "ngram",
    draft: Annotated[str | None, typer.Option(help="Of a mode with a head, the head's folder.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the mode, name=value; may repeat.")] = None,
    tiers: Annotated[str, typer.Option(help="Draft lengths, 0 among them.")] = "0,1,3,7",
    tree: Annotated[list[str] | None, typer.Option(help="A tier: nodes, depth, branches; may repeat.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="One that adapts; may repeat. cost and ema if none.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="So often all prompts; figures are of the median round.")] = 1,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    max_len: Annotated[int, typer.Option(min=2, help="Most tokens of a text; longer prompts are left out.")] = 2048,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Compare policies that adapt with every fixed tier, over the same prompts."""
    with session():
        draft_lens: tuple[int, ...] = (*parse_tiers(tiers), *map(parse_tree, tree or []))
        options = parse_options(option or []) | ({} if draft is None else {"draft": draft})
        modes.create(mode, options)
        contenders = ways(draft_lens, policy or ["cost", "ema"])
        target, tokenizer = load(model)
        fitting = fitting_prompts(tokenizer, prompts, count, max_len - new_tokens)
        asked = [(prompt.category, ids) for prompt, ids in fitting]
        random.Random(seed).shuffle(asked)
        sizes: dict[str, Any] = {"tiers": draft_lens, "max_len": max_len, "backend": backend, "prefix_reuse": False}
        with wrap(target, mode, **sizes, **options) as spec:
            warm_up(spec, contenders, asked[0][1])
            different = []
            for number in range(1, rounds + 1):
                with task(f"round {number} of {rounds}: {len(asked)} prompts by {len(contenders)} ways"):
                    different += run(spec, contenders, asked, new_tokens)
                for way in contenders:
                    way.end_round()
        result = report(contenders, different)
        console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
        for table in tables(result):
            console.print(table)
        console.print(f"texts that differ from the first one's: {', '.join(different) or 'none'}")
        if json_file is not None:
            settings = {"model": model, "prompts": name_of(prompts), "count": len(asked), "seed": seed}
            settings |= {"new_tokens": new_tokens, "mode": mode, "options": options, "rounds": rounds}
            settings["tiers"] = [fixed_name(draft_len) for draft_len in draft_lens]
            json_file.write_text(json.dumps({"machine": describe(), "settings": settings, **result}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
