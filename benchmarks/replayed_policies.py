"""Policies over recorded drafts of several modes, by category and without clocks.

``python -m benchmarks.replayed_policies TRACES --head FOLDER`` records the drafts of lookups, of a head and of both
over the same prompts, once, with the largest tier. It then replays them in simulated time, with prompts in several
orders, and compares both under each policy with the best single drafter of a category. See README.md beside this file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.drafter_rounds import ENOUGH
from benchmarks.drafters import BOTH, HEAD, LOOKUP, NAMES
from benchmarks.machine import describe
from benchmarks.serving import fitting_prompts
from speccompile import wrap
from speccompile.cli.models import load
from speccompile.cli.session import parse_options, session
from speccompile.errors import InvalidOption
from speccompile.policies import CostTable, Fixed, Ladder, parse_policy
from speccompile.policies.base import AnyPolicy
from speccompile.runtime.trace_reader import read_trace
from speccompile.tools.policy_lab.simulate import simulate
from speccompile.tools.policy_lab.texts import Text, texts_of

SUFFIX = "suffix"
SINGLES = (LOOKUP, SUFFIX, HEAD)
MODES: dict[str, str | list[str]] = {
    LOOKUP: "ngram",
    SUFFIX: "suffix",
    **{name: mode.split(",") if "," in mode else mode for mode, name in NAMES.items()},
}
#: In the folder of the traces: the category of each prompt, and where the drafts come from.
INDEX = "recorded.json"


@dataclass(frozen=True)
class Compared:
    """Both drafters under a policy, over one category: its speed over that of the best single one, for each order of
    the prompts."""

    category: str
    policy: str
    best: str
    ratios: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over all orders."""
        return mean(self.ratios)


def record(
    folder: Path,
    *,
    model: str,
    head: str,
    prompts: Path | None,
    count: int | None,
    new_tokens: int,
    draft_lens: Sequence[int],
    options: Mapping[str, Any],
) -> None:
    """Write a trace of each mode into ``folder``, of steps with the most drafts."""
    target, tokenizer = load(model)
    max_len = options["max_len"]
    fitting = fitting_prompts(tokenizer, prompts, count, max_len - new_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    tiers = (0, *draft_lens)
    for name, mode in MODES.items():
        own: dict[str, Any] = {"tiers": tiers, "prefix_reuse": False, **options}
        if name in (HEAD, BOTH):
            own["draft"] = head
        with wrap(target, mode, policy="cost", **own) as spec:
            # The tiers are timed, and their costs become a part of the trace.
            spec.engine.policies.prepare()
            spec.engine.policy = Fixed(tiers[-1])
            with spec.record_trace(folder / f"{name}.jsonl"):
                for _, ids in fitting:
                    row = torch.tensor([ids])
                    spec.generate(row, torch.ones_like(row), max_new_tokens=new_tokens, do_sample=False)
    made = {"machine": describe(), "model": model, "head": head, "new_tokens": new_tokens}
    made |= {"draft_lens": list(draft_lens), "options": dict(options)}
    index = {"categories": [prompt.category for prompt, _ in fitting], "recorded": made}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


@dataclass(frozen=True)
class Recorded:
    """Recorded drafts, by name of the mode. Costs are those that were measured for both drafters together, so noise
    between two measurements favours no mode."""

    categories: Sequence[str]
    texts: Mapping[str, Sequence[Text]]
    costs: CostTable
    draft_lens: tuple[int, ...]

    @staticmethod
    def read(folder: Path) -> Recorded:
        """Read what :func:`record` has written."""
        traces = {name: read_trace(folder / f"{name}.jsonl") for name in MODES}
        costs = traces[BOTH].costs
        assert costs is not None and costs.undrafted
        categories = json.loads((folder / INDEX).read_text())["categories"]
        texts = {name: texts_of(trace) for name, trace in traces.items()}
        assert all(len(own) == len(categories) for own in texts.values())
        return Recorded(categories, texts, costs, traces[BOTH].draft_lens)

    def costs_of(self, name: str) -> CostTable:
        """The costs of steps of a mode. Lookups never run a network."""
        if name == BOTH:
            return self.costs
        return CostTable(self.costs.entries if name == HEAD else self.costs.undrafted)

    def milliseconds(self, name: str, policy: AnyPolicy, order: Sequence[int]) -> dict[int, float]:
        """The time of each prompt, where they run one after another."""
        texts, costs = [self.texts[name][index] for index in order], self.costs_of(name)
        ladder = Ladder(self.draft_lens, costs)
        ran = simulate(policy, texts, ladder, costs, max_rows=1)
        return dict(zip(order, ran.by_text, strict=True))


def compare(recorded: Recorded, policies: Sequence[str], seeds: int) -> list[Compared]:
    """Both drafters under each policy, against every tier of each single drafter."""
    indices = range(len(recorded.categories))
    groups = {
        category: [index for index in indices if recorded.categories[index] == category]
        for category in dict.fromkeys(recorded.categories)
    } | {"all": list(indices)}
    # Without a policy that learns, the order does not matter.
    fixed = {
        f"{name}, K={k}": recorded.milliseconds(name, Fixed(k), indices)
        for name in SINGLES
        for k in recorded.draft_lens
        if k
    }
    found = []
    for text in policies:
        orders = [random.Random(seed).sample(indices, len(indices)) for seed in range(seeds)]
        policy = parse_policy(text, recorded.draft_lens)
        runs = [recorded.milliseconds(BOTH, policy, order) for order in orders]
        for category, group in groups.items():
            totals = {name: sum(own[index] for index in group) for name, own in fixed.items()}
            best = min(totals, key=totals.__getitem__)
            ratios = tuple(totals[best] / sum(run[index] for index in group) for run in runs)
            found.append(Compared(category, text, best, ratios))
    return found


def table(found: Sequence[Compared]) -> Table:
    shown = Table(title="both drafters over the best single one", title_justify="left")
    for heading in ("", "policy", "best", "mean", "lowest", "highest", f"at least {ENOUGH}"):
        shown.add_column(heading, justify="right" if heading in ("mean", "lowest", "highest") else "left")
    for row in found:
        ends = (f"{value:.3f}" for value in (row.mean, min(row.ratios), max(row.ratios)))
        shown.add_row(row.category, row.policy, row.best, *ends, "yes" if row.mean >= ENOUGH else "no")
    return shown


def main(
    traces: Annotated[Path, typer.Argument(help="Folder of the traces. They are recorded there if it has none.")],
    head: Annotated[str | None, typer.Option(help="An EAGLE-3 head, to record: a folder.")] = None,
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's JSON lines.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="So many prompts, spread over the categories.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most new tokens a prompt.")] = 96,
    draft_len: Annotated[list[int] | None, typer.Option(min=1, help="K; may repeat. 3 if none.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="May repeat. cost if none.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Orders of the prompts.")] = 20,
    option: Annotated[list[str] | None, typer.Option(help="An option of all, name=value; may repeat.")] = None,
    max_len: Annotated[int, typer.Option(min=2, help="Most tokens of a text; longer prompts are left out.")] = 2048,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Replay policies over recorded drafts, in simulated time."""
    with session():
        if not (traces / INDEX).exists():
            if head is None:
                reason = "the folder has no traces; give the head to record them with"
                raise InvalidOption(where="the command line", name="--head", value=None, reason=reason)
            options = {"max_len": max_len, **parse_options(option or [])}
            lens = sorted(draft_len or [3])
            record(
                traces,
                model=model,
                head=head,
                prompts=prompts,
                count=count,
                new_tokens=new_tokens,
                draft_lens=lens,
                options=options,
            )
        found = compare(Recorded.read(traces), policy or ["cost"], seeds)
        Console().print(table(found))
        if json_file is not None:
            made = json.loads((traces / INDEX).read_text())["recorded"]
            rows = [asdict(row) | {"mean": row.mean} for row in found]
            json_file.write_text(json.dumps({"recorded": made, "seeds": seeds, "compared": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
