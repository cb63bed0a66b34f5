"""What does sampling cost: steps with the whole pipeline next to greedy ones, at each draft length.

``python -m benchmarks.sampling``; see README.md beside this file.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.prompts import name_of
from benchmarks.serving import fitting_prompts
from benchmarks.steps import interleaved, seconds
from speccompile import Speculator, wrap
from speccompile.cli.models import load
from speccompile.cli.session import parse_tiers, session
from speccompile.graph.keys import Kind
from speccompile.utils.progress import task

PIPED_WIDTH = 120
GREEDY = "greedy"
# As many new tokens as stand before the step that is timed.
BEFORE = 8
ASKED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}


@dataclass(frozen=True)
class Variant:
    """An executable's kind, and the parameters of its row as the arena holds them."""

    kind: Kind
    parameters: Mapping[str, float]


#: The asked one first. What a request does not say is off here, top_k 50 included.
VARIANTS = {
    "temperature, top_p, penalty": Variant("sampled", ASKED),
    "and top_k": Variant("sampled", ASKED | {"top_k": 50}),
    "temperature": Variant("sampled", {"temperature": 0.8}),
    "sampled, of a greedy row": Variant("sampled", {}),
}
OFF = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "top_k": 0}


class StepStart:
    """A live row in the middle of a text whose next tokens are known: they are its drafts."""

    def __init__(self, spec: Speculator, prompt: Sequence[int], draft_len: int) -> None:
        self.spec, self.draft_len, arena = spec, draft_len, spec.arena
        spec.set_tier(0)
        longest = arena.layout.max_len
        request = spec.engine.submit(
            prompt, max_new_tokens=longest, eos_token_id=[], do_sample=True, seed=1, top_k=0, **ASKED
        )
        while len(request.new_tokens) < BEFORE:
            spec.engine.step()
        self.slot = int(arena["slots"][0])
        saved = {name: arena[name].clone() for name, tensor in arena.layout.tensors.items() if not tensor.follows_text}
        while len(request.new_tokens) < BEFORE + draft_len:
            spec.engine.step()
        if draft_len:
            drafts = torch.tensor(request.new_tokens[BEFORE : BEFORE + draft_len])
            saved["draft_tokens"][self.slot, :draft_len] = drafts
            saved["draft_lens"][self.slot] = draft_len
        self.saved = saved
        request.cancel()
        spec.engine.step()

    def step(self, variant: Variant) -> Callable[[], float]:
        """Seconds of one step from here; KV that it writes is written again by the next one."""
        tier = self.spec.engine.tiers[self.draft_len, 1, variant.kind]

        def restore_and_run() -> float:
            for name, value in self.saved.items():
                self.spec.arena[name].copy_(value)
            for name, number in (OFF | dict(variant.parameters)).items():
                self.spec.arena[name][self.slot] = number
            return seconds(tier.run)

        return restore_and_run


def compare(spec: Speculator, prompts: Sequence[list[int]], draft_len: int, repeats: int) -> dict[str, Any]:
    """One row of the report: greedy steps and those of all variants in turns, over all texts."""
    variants = {GREEDY: Variant("greedy", {}), **VARIANTS}
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for prompt in prompts:
        start = StepStart(spec, prompt, draft_len)
        for name, values in interleaved({name: start.step(item) for name, item in variants.items()}, repeats).items():
            taken[name] += values
    median = {name: statistics.median(values) for name, values in taken.items()}
    least = {name: min(values) for name, values in taken.items()}
    ratios = {}
    for name in VARIANTS:
        # Of neighbours in time, so that their spread is that of the comparison and not of the machine's day.
        turns = [own / greedy for own, greedy in zip(taken[name], taken[GREEDY], strict=True)]
        quarters = statistics.quantiles(turns, n=4)
        ratios[name] = {
            "of_medians": median[name] / median[GREEDY],
            "of_least": least[name] / least[GREEDY],
            "of_turns": {"median": quarters[1], "quartiles": [quarters[0], quarters[2]]},
        }
    return {
        "draft_len": draft_len,
        "milliseconds": {name: {"median": 1e3 * median[name], "least": 1e3 * least[name]} for name in taken},
        "ratios": ratios,
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="a sampled step to a greedy one: medians (least; quartiles of turns)", title_justify="left")
    table.add_column("K", justify="right")
    table.add_column("greedy step", justify="right")
    for name in VARIANTS:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [
            f"{ratio['of_medians']:.3f}x\n({ratio['of_least']:.3f}; "
            f"{ratio['of_turns']['quartiles'][0]:.2f}-{ratio['of_turns']['quartiles'][1]:.2f})"
            for ratio in row["ratios"].values()
        ]
        table.add_row(str(row["draft_len"]), f"{row['milliseconds'][GREEDY]['median']:.1f} ms", *cells)
    return table


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's or HumanEval's JSON lines, also .gz.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Texts.")] = 4,
    tiers: Annotated[str, typer.Option(help="Draft lengths, 0 among them.")] = "0,1,3,7",
    repeats: Annotated[int, typer.Option(min=1, help="Turns, for each text and draft length.")] = 25,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    max_len: Annotated[int, typer.Option(min=2, help="Most tokens of a text; longer prompts are left out.")] = 1024,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Time greedy and sampled steps, in turns."""
    with session():
        draft_lens = parse_tiers(tiers)
        target, tokenizer = load(model)
        room = BEFORE + 2 * max(draft_lens) + 2
        texts = [ids for _, ids in fitting_prompts(tokenizer, prompts, count, max_len - room)]
        with (
            wrap(target, "ngram", tiers=draft_lens, max_len=max_len, backend=backend, sampling=True) as spec,
            task("step by step"),
        ):
            rows = [compare(spec, texts, draft_len, repeats) for draft_len in draft_lens]
            kernels = spec.explain().partition("kernels")[2].partition("\n")[0].strip()
        Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table(rows))
        print(f"kernels: {kernels}")
        if json_file is not None:
            settings = {"model": model, "prompts": name_of(prompts), "texts": len(texts), "repeats": repeats}
            settings |= {"max_len": max_len, "parameters": ASKED, "kernels": kernels}
            report = {"machine": describe(), "settings": settings, "rows": rows}
            json_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
