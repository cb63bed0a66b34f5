"""Measurements of a server beside hostile clients, the bounds of a sound server, and both as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

from benchmarks.attacks import Attack, Outcome
from benchmarks.first_token import Answer
from benchmarks.health import Probe
from benchmarks.memory import Reading, at, growth, slope
from benchmarks.serving import percentile


@dataclass(frozen=True)
class Hit:
    """One attack that has ended, with the moments of the system's monotonic clock."""

    attack: str
    begun: float
    ended: float
    outcome: Outcome


@dataclass(frozen=True)
class Bounds:
    """Bounds that a sound server keeps.

    Args:
        health: seconds of ``/health`` at p99.
        growth: of the server's memory over the second half of the time, in its share at half; it says nothing of a
            time shorter than ``growth_seconds``.
    """

    health: float = 0.5
    growth: float = 0.02
    growth_seconds: float = 300.0


@dataclass
class Mix:
    """All that was seen.

    Args:
        started: the moment of the first request.
        server: memory of the server's process; ``tree`` has its children too.
        faults: of the server: in its log, in its end.
    """

    started: float
    seconds: float
    probes: list[Probe] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    server: list[Reading] = field(default_factory=list)
    tree: list[Reading] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def health(self, percent: int) -> float:
        """Seconds of ``/health``. A question without an answer took the longest time."""
        return percentile([probe.seconds for probe in self.probes], percent)

    def beside(self, name: str) -> list[float]:
        """Seconds of ``/health`` while an attack ran."""
        spans = [(hit.begun, hit.ended) for hit in self.hits if hit.attack == name]
        return [
            p.seconds
            for p in self.probes
            if any(begun <= p.asked + p.seconds and p.asked <= ended for begun, ended in spans)
        ]

    def problems(self, bounds: Bounds, attacks: Sequence[Attack]) -> list[str]:
        """All that a sound server does not do."""
        found = [*self.faults, *self.wrong]
        if not self.health(99) < bounds.health:
            found.append(f"/health: {self.health(99):.2f} s at p99, not below {bounds.health:g} s")
        unhealthy = Counter(probe.status for probe in self.probes if probe.status != 200)
        found += [f"/health: status {status}, {count} times" for status, count in unhealthy.items()]
        if self.seconds >= bounds.growth_seconds and self.server and not growth(self.server) <= bounds.growth:
            found.append(
                f"memory grew by {growth(self.server):.1%} in the second half, by more than {bounds.growth:.1%}"
            )
        for attack in attacks:
            outcomes = Counter(hit.outcome for hit in self.hits if hit.attack == attack.name)
            wrong = {outcome: count for outcome, count in outcomes.items() if outcome not in attack.expected}
            found += [f"{attack.name}: {outcome}, {count} times" for outcome, count in wrong.items()]
        return found


def summary_table(mix: Mix) -> Table:
    shown = Table(title=f"{mix.seconds / 60:g} minutes", title_justify="left", show_header=False)
    shown.add_column("")
    shown.add_column("", justify="right")
    shown.add_row(
        "/health, p50 / p99 / max", " / ".join(f"{mix.health(percent):.3f}" for percent in (50, 99, 100)) + " s"
    )
    late = percentile([probe.late for probe in mix.probes], 99)
    shown.add_row("asked so late by its client, which had no core, p99", f"{late:.3f} s")
    for name, readings in (("the server's memory", mix.server), ("the same with its processes", mix.tree)):
        if readings:
            sizes = [at(readings, moment) for moment in (60.0, mix.seconds / 2, mix.seconds)]
            shown.add_row(
                f"{name}, at 1 minute / half / the end", " / ".join(f"{size / 2**20:.0f}" for size in sizes) + " MiB"
            )
            shown.add_row(f"{name}, slope of the second half", f"{slope(readings) * 60 / 2**20:+.2f} MiB a minute")
    first = [answer.first_token for answer in mix.answers if answer.first_token is not None and not answer.long]
    failed = sum(answer.error is not None for answer in mix.answers)
    shown.add_row("honest requests, and those that failed", f"{len(mix.answers)}, {failed}")
    shown.add_row(
        "first token of short prompts, p50 / p95", f"{percentile(first, 50):.2f} / {percentile(first, 95):.2f} s"
    )
    return shown


def attacks_table(mix: Mix, attacks: Sequence[Attack]) -> Table:
    shown = Table(title="attacks", title_justify="left")
    shown.add_column("")
    shown.add_column("outcomes")
    for heading in ("longest", "/health meanwhile\np95 / max"):
        shown.add_column(heading, justify="right")
    for attack in attacks:
        hits = [hit for hit in mix.hits if hit.attack == attack.name]
        if not hits:
            continue
        counts = Counter(str(hit.outcome) for hit in hits)
        outcomes = ", ".join(f"{count} x {outcome}" for outcome, count in sorted(counts.items()))
        longest = max(hit.ended - hit.begun for hit in hits)
        beside = mix.beside(attack.name)
        shown.add_row(
            attack.name, outcomes, f"{longest:.1f} s", f"{percentile(beside, 95):.2f} / {percentile(beside, 100):.2f} s"
        )
    return shown
