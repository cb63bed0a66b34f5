"""The most that drafters could reach, whatever they cost: ``python -m benchmarks.ceiling --head FOLDER``.

Each drafter drafts after every prefix of the target's greedy text (:mod:`benchmarks.watched_drafts`). From the counts
of right drafts follow the steps of any choice among drafters and draft lengths, also of the best choice at each step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.drafters import NAMES, PIPED_WIDTH, Group, groups
from benchmarks.machine import describe
from benchmarks.prompts import name_of
from benchmarks.serving import fitting_prompts
from benchmarks.watched_drafts import OFFERED, RIGHT, Watched
from speccompile import Speculator, wrap
from speccompile.cli.models import load
from speccompile.cli.progress import count_runs
from speccompile.cli.session import parse_options, session
from speccompile.errors import InvalidOption
from speccompile.graph.step_form import StepForm
from speccompile.heads import load_eagle3
from speccompile.sampling.draft_vocab import target_ids

FIRST, BEST = "the first that drafts", "the best at each step"


@dataclass(frozen=True)
class Drafted:
    """The drafts of one drafter in one text: an entry for each token that was committed by a step."""

    offered: tuple[int, ...]
    right: tuple[int, ...]

    def steps(self, draft_len: int) -> int:
        """The number of steps that commit the text, each with ``draft_len`` drafts at most."""
        at = steps = 0
        while at < len(self.right):
            steps += 1
            at += 1 + min(self.right[at], draft_len)
        return steps


def choose(drafters: Sequence[Drafted], choice: Callable[[Sequence[tuple[int, int]]], tuple[int, int]]) -> Drafted:
    """One drafter of several: at each token what ``choice`` returns of their ``(offered, right)``."""
    places = zip(*(zip(own.offered, own.right, strict=True) for own in drafters), strict=True)
    offered, right = zip(*map(choice, places), strict=True)
    return Drafted(offered, right)


def first_that_drafts(found: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return next((own for own in found if own[0]), (0, 0))


def best(found: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return max(found, key=lambda own: own[1])


def check_knows_the_text_alone(spec: Speculator) -> None:
    """Refuse a drafter that keeps logits of its drafts: those of right ones tell it the text before a run would.

    Raises:
        InvalidOption: it is such a drafter.
    """
    if spec.mode.after_logits(StepForm(spec.engine.draft_lens[-1])):
        reason = "it keeps what the target answers to right drafts, which are not accepted here"
        raise InvalidOption(where="the command line", name="--mode", value=spec.mode.name, reason=reason)


def watch_text(spec: Speculator, ids: Sequence[int], new_tokens: int, draft_len: int) -> tuple[list[int], Drafted]:
    """The greedy text of at most ``new_tokens``, and what ``spec`` drafted in it."""
    for name in (OFFERED, RIGHT):
        spec.arena[name].fill_(0)
    prompt = torch.tensor([ids], device=spec.arena.device)
    # Near the limit fewer drafts fit.
    most = new_tokens + draft_len
    text = spec.generate(prompt, torch.ones_like(prompt), max_new_tokens=most, do_sample=False)[0, len(ids) :]
    text = text[:new_tokens]
    places = slice(len(ids) + 1, len(ids) + len(text))
    offered, right = (tuple(spec.arena[name][places].tolist()) for name in (OFFERED, RIGHT))
    return text.tolist(), Drafted(offered, right)


def figures(group: Group, drafted: dict[str, list[Drafted]], draft_lens: Sequence[int]) -> list[dict[str, Any]]:
    """Figures of each drafter: the share of tokens after which it drafts, the shares after which its first i drafts are
    right, and the tokens of a step."""
    rows = []
    for name, texts in drafted.items():
        own = [texts[index] for index in group.indices]
        offered = [count for text in own for count in text.offered]
        right = [count for text in own for count in text.right]
        steps = {k: sum(text.steps(k) for text in own) for k in draft_lens}
        rows.append(
            {
                "drafter": name,
                "drafts": sum(count > 0 for count in offered) / len(offered),
                "right": [sum(count >= i for count in right) / len(right) for i in range(1, max(draft_lens) + 1)],
                "acceptance_length": {str(k): len(right) / count for k, count in steps.items()},
            }
        )
    return rows


def table_of(group: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=group, title_justify="left")
    lens, places = list(rows[0]["acceptance_length"]), range(1, 1 + len(rows[0]["right"]))
    for heading in ("", "drafts", *(f"first {i} right" for i in places), *(f"K={k}" for k in lens)):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows:
        shares = [f"{100 * share:.0f} %" for share in (row["drafts"], *row["right"])]
        table.add_row(row["drafter"], *shares, *[f"{value:.2f}" for value in row["acceptance_length"].values()])
    return table


def outside_of(draft_vocab: set[int], texts: Sequence[Sequence[int]]) -> float:
    """The share of tokens that a head with these draft tokens cannot draft."""
    tokens = [token for text in texts for token in text[1:]]
    return sum(token not in draft_vocab for token in tokens) / len(tokens)


def main(
    head: Annotated[Path | None, typer.Option(help="An EAGLE-3 head: a folder.")] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help="A mode; may repeat. ngram, suffix and the head, if none.")
    ] = None,
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's or HumanEval's JSON lines, also .gz.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="So many prompts, spread over the categories.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most new tokens a prompt.")] = 96,
    draft_len: Annotated[list[int] | None, typer.Option(min=1, help="K; may repeat. 3 and 7 if none.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of all, name=value; may repeat.")] = None,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    max_len: Annotated[int, typer.Option(min=2, help="Most tokens of a text; longer prompts are left out.")] = 2048,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Compare drafters, the first of them that drafts, and the best of them at each step, by tokens a step."""
    with session():
        lens = sorted(set(draft_len or (3, 7)))
        modes = mode or ["ngram", "suffix", *(["eagle3_one_model"] if head else [])]
        target, tokenizer = load(model)
        fitting = fitting_prompts(tokenizer, prompts, count, max_len - new_tokens - lens[-1])
        shared: dict[str, Any] = {"max_len": max_len, "backend": backend, "prefix_reuse": False, "max_batch": 1}
        shared |= {"acceptance": Watched(), "tiers": (0, lens[-1]), "policy": f"fixed:{lens[-1]}"}
        shared |= parse_options(option or [])
        drafted: dict[str, list[Drafted]] = {}
        texts: list[list[int]] = []
        d2t = None if head is None else load_eagle3(head, target).d2t
        vocab = set() if d2t is None else set(target_ids(d2t).tolist())
        with count_runs("Decoding, prompt by prompt", len(modes) * len(fitting)) as after_run:
            for text in modes:
                own = {"draft": str(head)} if "eagle3" in text else {}
                with wrap(target, text, **own, **shared) as spec:
                    check_knows_the_text_alone(spec)
                    found = []
                    for _, ids in fitting:
                        found.append(watch_text(spec, ids, new_tokens, lens[-1]))
                        after_run()
                texts = [tokens for tokens, _ in found]
                drafted[NAMES.get(text, text)] = [counts for _, counts in found]
        singles = list(zip(*drafted.values(), strict=True))
        if len(drafted) > 1:
            drafted[FIRST] = [choose(own, first_that_drafts) for own in singles]
            drafted[BEST] = [choose(own, best) for own in singles]
        categories = [prompt.category for prompt, _ in fitting]
        rows = [
            {"category": group.name, "prompts": len(group.indices), "drafters": figures(group, drafted, lens)}
            | ({"outside_draft_vocab": outside_of(vocab, [texts[i] for i in group.indices])} if vocab else {})
            for group in groups(categories)
        ]
        show(rows)
        if json_file is not None:
            settings = {"model": model, "head": head and str(head), "modes": modes, "prompts": name_of(prompts)}
            settings |= {"count": len(fitting), "new_tokens": new_tokens, "draft_lens": lens, "options": option or []}
            whole = {"machine": describe(), "settings": settings, "categories": rows}
            json_file.write_text(json.dumps(whole, indent=1) + "\n")


def show(rows: Sequence[dict[str, Any]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    for row in rows:
        console.print(table_of(row["category"], row["drafters"]))
        if "outside_draft_vocab" in row:
            console.print(f"{100 * row['outside_draft_vocab']:.1f} % of the tokens are outside of the draft vocabulary")


if __name__ == "__main__":
    typer.run(main)
