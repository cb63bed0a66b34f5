"""A comparison as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from speccompile.cli.measure import Run, Summary
from speccompile.cli.prompts import NamedPrompt
from speccompile.runtime.check import Difference


@dataclass(frozen=True)
class Comparison:
    """``runs`` and ``differences`` (to the first variant, usually transformers' eager generate) by variant.

    ``warm_up_seconds`` are those of the untimed first call, where a variant compiles in it.
    """

    prompts: Sequence[NamedPrompt]
    runs: Mapping[str, Sequence[Run]]
    differences: Mapping[str, Sequence[Difference]]
    warm_up_seconds: Mapping[str, float]

    def rows(self) -> list[dict[str, Any]]:
        """One line of figures a variant."""
        reference = Summary(next(iter(self.runs.values())))
        return [self._row(name, Summary(runs), reference) for name, runs in self.runs.items()]

    def _row(self, name: str, summary: Summary, reference: Summary) -> dict[str, Any]:
        different = self.differences[name]
        return {
            "variant": name,
            "tokens_per_second": summary.tokens_per_second,
            "ratio": summary.tokens_per_second / reference.tokens_per_second,
            "decode_tokens_per_second": summary.decode_tokens_per_second,
            "decode_ratio": _ratio(summary.decode_tokens_per_second, reference.decode_tokens_per_second),
            "first_token_seconds": summary.first_seconds,
            "acceptance_length": summary.acceptance_length,
            "same_tokens": not different,
            "same_texts": len(summary.runs) - len(different),
            "largest_logit_change": max((item.logit_change for item in different), default=0.0),
            "warm_up_seconds": self.warm_up_seconds.get(name),
        }

    def as_json(self) -> dict[str, Any]:
        runs = [
            {"variant": name, "prompt": prompt.name, "category": prompt.category}
            | {"new_tokens": len(run.tokens)}
            | {key: value for key, value in asdict(run).items() if key != "tokens"}
            for name, own in self.runs.items()
            for prompt, run in zip(self.prompts, own, strict=True)
        ]
        differences = [{"variant": name} | asdict(item) for name, own in self.differences.items() for item in own]
        return {"variants": self.rows(), "differences": differences, "runs": runs}


def _ratio(value: float, reference: float) -> float:
    return value / reference if reference else 0.0


def runs_table(comparison: Comparison) -> Table:
    headings = ("tokens/s", "ratio", "decode tokens/s", "ratio", "first token", "acceptance length", "same tokens")
    table = _table(f"{len(comparison.prompts)} prompts", "", *headings)
    for row in comparison.rows():
        same = "yes" if row["same_tokens"] else f"no: {row['same_texts']} of {len(comparison.prompts)}"
        table.add_row(
            row["variant"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['ratio']:.2f}x",
            f"{row['decode_tokens_per_second']:.1f}",
            f"{row['decode_ratio']:.2f}x",
            f"{row['first_token_seconds']:.2f} s",
            f"{row['acceptance_length']:.2f}",
            same,
        )
    return table


def categories_table(comparison: Comparison) -> Table:
    """tokens/s and acceptance length of each variant by category."""
    table = _table("tokens/s (acceptance length) by category", "category", "prompts", *comparison.runs)
    for category in dict.fromkeys(prompt.category for prompt in comparison.prompts):
        chosen = [index for index, prompt in enumerate(comparison.prompts) if prompt.category == category]
        summaries = [Summary([runs[index] for index in chosen]) for runs in comparison.runs.values()]
        cells = [f"{item.tokens_per_second:.1f} ({item.acceptance_length:.2f})" for item in summaries]
        table.add_row(category, str(len(chosen)), *cells)
    return table


def build_table(builds: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """Seconds and peak memory of what ran in processes of its own, by what and by cache."""
    table = _table("In processes of their own", "", "cold build", "warm build", "peak memory")
    for name, heats in builds.items():
        seconds = [f"{heats[heat]['seconds']:.1f} s" if heat in heats else "-" for heat in ("cold", "warm")]
        # Compiling needs memory of its own, so the warm run is the one that says what decoding needs.
        peak = list(heats.values())[-1]["peak_rss_bytes"]
        table.add_row(name, *seconds, f"{peak / 2**20:,.0f} MiB")
    return table


def _table(title: str, first: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
