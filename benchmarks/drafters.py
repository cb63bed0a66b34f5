"""Modes side by side over the same prompts, by category: every tier, trees, and policies that adapt.

``python -m benchmarks.drafters --prompts FILE --head FOLDER``; see README.md beside this file.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.drafter_rounds import Runs, keeps_up, median_runs
from benchmarks.machine import describe
from benchmarks.own_memory import OwnMemory
from benchmarks.prompts import name_of
from benchmarks.serving import fitting_prompts
from speccompile import Speculator, Tree, wrap
from speccompile.cli.measure import NEAR_TIE, Continued, Run, Summary, TokenTimer, Variant, measure
from speccompile.cli.models import load
from speccompile.cli.progress import count_runs
from speccompile.cli.session import parse_options, session
from speccompile.errors import InvalidOption
from speccompile.policies import Fixed, LearningPolicy, parse_policy
from speccompile.policies.base import AnyPolicy
from speccompile.runtime.check import first_difference

PIPED_WIDTH = 160
NONE, LOOKUP, HEAD, BOTH = "none", "ngram", "head", "suffix+head"
#: Names of modes in the tables; others have their own.
NAMES = {"eagle3_one_model": HEAD, "suffix,eagle3_one_model": BOTH}
#: Categories of Spec-Bench whose answers quote what the prompt has.
QUOTING = ("translation", "summarization", "rag", "extraction")
#: Tokens whose generation warms a way up.
WARM_UP_TOKENS = 8


@dataclass
class Way:
    """A wrapped model under a policy; ``steps`` counts its steps by draft length."""

    name: str
    spec: Speculator
    policy: AnyPolicy
    steps: Counter[int]
    memory: OwnMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = OwnMemory(self.spec)

    @property
    def composed(self) -> bool:
        """Whether its mode is several drafters."""
        return len(self.spec.mode.drafter_names) > 1

    def variant(self, temperature: float) -> Variant:
        """Decodes with it. At a temperature, the seed depends on the prompt alone."""

        def generate(ids: torch.Tensor, new_tokens: int, clock: TokenTimer) -> torch.Tensor:
            self.spec.engine.policy = self.policy
            self.spec.stats.reset()
            options: dict[str, Any] = {"do_sample": False}
            if temperature:
                options = {"do_sample": True, "temperature": temperature, "top_k": 0, "seed": int(ids.sum())}
            options |= {"max_new_tokens": new_tokens, "streamer": clock, "num_return_sequences": 1}
            with self.memory.used(keep=new_tokens > WARM_UP_TOKENS):
                result = self.spec.generate(ids, torch.ones_like(ids), **options)
            request = self.spec.stats.requests[0]
            clock.passes, clock.emitted = request.row_steps, request.emitted_tokens
            self.steps.update(self.spec.stats.tier_steps)
            return result

        return Variant(self.name, generate)


def adapting(text: str, draft_lens: Collection[int]) -> Continued:
    """A new policy by its name. One of a fixed draft length is refused."""
    policy = parse_policy(text, tuple(draft_lens))
    if not isinstance(policy, LearningPolicy):
        reason = "it does not adapt; every fixed tier is there already"
        raise InvalidOption(where="the command line", name="--policy", value=text, reason=reason)
    return Continued(policy)


def parse_tree(text: str) -> Tree:
    try:
        nodes, depth, branches = map(int, text.split(","))
    except ValueError:
        reason = "write nodes, depth and branches of a dynamic tree as 7,4,4"
        raise InvalidOption(where="the command line", name="--tree", value=text, reason=reason) from None
    return Tree.dynamic(nodes, depth, branches)


def ways(wrapped: Mapping[str, Speculator], policies: Sequence[str]) -> list[Way]:
    """Every tier of each, chains before trees; then each under each policy. The first, K=0, has its own name."""
    plain, *_ = wrapped.values()
    found = [Way(NONE, plain, Fixed(0), Counter())]
    chains = [
        (name, spec, [k for k in spec.engine.draft_lens if k and not isinstance(k, Tree)])
        for name, spec in wrapped.items()
    ]
    for name, spec, lens in chains:
        names = [name] if len(lens) == 1 else [f"{name}, K={k}" for k in lens]
        found += [Way(own, spec, Fixed(k), Counter()) for own, k in zip(names, lens, strict=True)]
    for name, spec in wrapped.items():
        trees = [tier for tier in spec.engine.draft_lens if isinstance(tier, Tree)]
        found += [Way(f"{name}, tree:{int(t)},{t.depth},{t.branches}", spec, Fixed(t), Counter()) for t in trees]
    for name, spec in wrapped.items():
        lens = spec.engine.draft_lens
        found += [Way(f"{name}, {text}", spec, adapting(text, lens), Counter()) for text in policies if len(lens) > 1]
    return found


def warm_up(way: Way, ids: torch.Tensor) -> None:
    """Its tiers are timed, and each has run; its policy has learned nothing from that."""
    generate = way.variant(0.0).generate
    policy = way.policy
    for draft_len in way.spec.engine.draft_lens:
        way.policy = Fixed(draft_len)
        generate(ids, WARM_UP_TOKENS, TokenTimer())
    way.policy = way.spec.engine.policy = policy
    way.spec.engine.policies.prepare()
    way.steps.clear()


@dataclass(frozen=True)
class Group:
    """Prompts whose figures are summed: a category, or several."""

    name: str
    indices: tuple[int, ...]

    def summary(self, runs: Sequence[Run]) -> Summary:
        return Summary([runs[index] for index in self.indices])


def groups(categories: Sequence[str]) -> list[Group]:
    """Each category, those that do not quote, and all."""
    found = [
        Group(category, tuple(index for index, other in enumerate(categories) if other == category))
        for category in dict.fromkeys(categories)
    ]
    ordinary = tuple(index for index, category in enumerate(categories) if category not in QUOTING)
    if 0 < len(ordinary) < len(categories):
        found.append(Group("those that do not quote", ordinary))
    return [*found, Group("all", tuple(range(len(categories))))]


def report(ways: Sequence[Way], runs: dict[str, list[Run]], categories: Sequence[str]) -> dict[str, Any]:
    """The figures of each group. Speeds are divided by those of no drafts and of the first way that drafts."""
    bases = [way.name for way in ways[:2]]
    rows = []
    for group in groups(categories):
        summaries = {name: group.summary(own) for name, own in runs.items()}
        speeds = {name: summary.decode_tokens_per_second for name, summary in summaries.items()}
        rows.append(
            {
                "category": group.name,
                "prompts": len(group.indices),
                "acceptance_length": {name: summary.acceptance_length for name, summary in summaries.items()},
                "decode_tokens_per_second": speeds,
                "ratios": {base: {name: speeds[name] / speeds[base] for name in speeds} for base in bases},
            }
        )
    steps = {way.name: {str(k): n / way.steps.total() for k, n in sorted(way.steps.items())} for way in ways}
    return {"categories": rows, "steps_by_tier": steps}


def comparisons(contenders: Sequence[Way], rounds: Sequence[Runs], categories: Sequence[str]) -> list[dict[str, Any]]:
    """Compare each composition under a policy with the best single drafter of fixed tiers, by category."""
    fixed = [way for way in contenders if isinstance(way.policy, Fixed) and way.policy != Fixed(0)]
    singles = [way.name for way in fixed if not way.composed]
    adapting = [way.name for way in contenders if way.composed and not isinstance(way.policy, Fixed)]
    return [
        {"category": group.name, "way": name, **asdict(found), "enough": found.enough}
        for group in groups(categories)
        for name in adapting
        if singles
        for found in [keeps_up(rounds, name, singles, group.indices)]
    ]


def comparison_table(found: Sequence[dict[str, Any]]) -> Table:
    table = _table("speed over the best single drafter", ["way", "best", "ratio", "95 %", "enough"])
    for row in found:
        interval = f"{row['low']:.2f} to {row['high']:.2f}"
        enough = "yes" if row["enough"] else "no"
        table.add_row(row["category"], row["way"], row["best"], f"{row['ratio']:.2f}x", interval, enough)
    return table


def tables(report: dict[str, Any]) -> list[Table]:
    names = list(report["steps_by_tier"])
    lengths = _table("acceptance length", ["prompts", *names[1:]])
    speeds = _table("tokens/s after the first token", names)
    for row in report["categories"]:
        category = row["category"]
        lengths.add_row(category, str(row["prompts"]), *[f"{row['acceptance_length'][name]:.2f}" for name in names[1:]])
        speeds.add_row(category, *[f"{row['decode_tokens_per_second'][name]:.1f}" for name in names])
    found = [lengths, speeds]
    for base in report["categories"][0]["ratios"]:
        others = [name for name in names if name != base]
        table = _table(f"speed over {base}", others)
        for row in report["categories"]:
            table.add_row(row["category"], *[f"{row['ratios'][base][name]:.2f}x" for name in others])
        found.append(table)
    return [*found, comparison_table(report["comparisons"])] if report["comparisons"] else found


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def main(
    head: Annotated[Path | None, typer.Option(help="An EAGLE-3 head: a folder.")] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="A mode, with commas several, composed; may repeat. ngram, and with a head its modes, if none."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's or HumanEval's JSON lines, also .gz.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="So many prompts, spread over the categories.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most new tokens a prompt.")] = 96,
    draft_len: Annotated[list[int] | None, typer.Option(min=1, help="K; may repeat. 3 if none.")] = None,
    tree: Annotated[
        list[str] | None, typer.Option(help="A tier of all but ngram: nodes, depth, branches; may repeat.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="One that adapts; may repeat. cost if none.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    option: Annotated[list[str] | None, typer.Option(help="An option of all, name=value; may repeat.")] = None,
    draft_weights: Annotated[str, typer.Option(help="Of the head: auto, same, int8 or int4.")] = "auto",
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    max_len: Annotated[int, typer.Option(min=2, help="Most tokens of a text; longer prompts are left out.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all prompts; figures are of median runs.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Compare no drafter with modes, at each tier and under policies that adapt, over the same prompts."""
    with session(), ExitStack() as opened:
        lens, trees = draft_len or [3], [parse_tree(text) for text in tree or []]
        policies = policy or ["cost"]
        for text in policies:
            adapting(text, (0, *lens, *trees))
        target, tokenizer = load(model)
        fitting = fitting_prompts(tokenizer, prompts, count, max_len - new_tokens)
        ids = [torch.tensor([own], device=target.device) for _, own in fitting]
        shared: dict[str, Any] = {"max_len": max_len, "backend": backend, "prefix_reuse": False}
        shared |= parse_options(option or [])
        wrapped = {NONE: opened.enter_context(wrap(target, "none", tiers=(0,), **shared))}
        for text in mode or [LOOKUP, *(NAMES if head else ())]:
            own: dict[str, Any] = {"tiers": (0, *lens, *(() if text == LOOKUP else trees))}
            if "eagle3" in text:
                own |= {"draft": str(head), "draft_weights": draft_weights}
            drafters = text.split(",")
            spec = wrap(target, drafters if len(drafters) > 1 else text, **own, **shared)
            wrapped[NAMES.get(text, text)] = opened.enter_context(spec)
        contenders = ways(wrapped, policies)
        for way in contenders:
            warm_up(way, ids[0])
        variants = [way.variant(temperature) for way in contenders]
        with count_runs("Decoding, prompt by prompt", rounds * len(variants) * (len(ids) + 1)) as after_run:
            measured = []
            for _ in range(rounds):
                for way in contenders:
                    way.memory.forget()
                measured.append(measure(variants, ids, new_tokens, after_run))
        runs, categories = median_runs(measured), [prompt.category for prompt, _ in fitting]
        result = report(contenders, runs, categories)
        result["comparisons"] = comparisons(contenders, measured, categories) if rounds > 1 else []
        different = show(result, target, ids, measured)
        if json_file is not None:
            settings = {"model": model, "head": head and str(head), "modes": list(wrapped), "prompts": name_of(prompts)}
            settings |= {"count": len(ids), "new_tokens": new_tokens, "draft_lens": lens, "trees": tree or []}
            settings |= {"policies": policies, "temperature": temperature, "draft_weights": draft_weights}
            settings |= {"options": option or [], "max_len": max_len, "rounds": rounds}
            whole = {"machine": describe(), "settings": settings, "different_texts": different, **result}
            json_file.write_text(json.dumps(whole, indent=1) + "\n")


def show(result: dict[str, Any], target: Any, ids: Sequence[torch.Tensor], rounds: Sequence[Runs]) -> list[str]:
    """Print the tables, and where texts differ, which is returned."""
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    for table in tables(result):
        console.print(table)
    different = sorted({line for runs in rounds for line in _different_texts(target, ids, runs)})
    for line in different:
        console.print(line)
    console.print(f"the same texts as without drafts: {'no' if different else 'yes'}")
    return different


def _different_texts(target: Any, ids: Sequence[torch.Tensor], runs: Runs) -> list[str]:
    """Where a text differs from the one without drafts, and by how much the logits that decide it do."""
    found = []
    for name, own in runs.items():
        for index, (prompt, expected, got) in enumerate(zip(ids, runs[NONE], own, strict=True)):
            difference = first_difference(target, index, prompt[0].tolist(), expected.tokens, got.tokens)
            if difference is not None:
                near = " (a near-tie of floating point)" if difference.logit_change < NEAR_TIE else ""
                found.append(f"{name}, {difference}{near}")
    return found


if __name__ == "__main__":
    typer.run(main)
