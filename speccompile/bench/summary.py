"""Summary of results, as plain data: the terminal, the CSV file, the page and ``--json`` show this."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from speccompile.bench.bootstrap import Interval
from speccompile.bench.calibration import calibration_of
from speccompile.bench.figures import (
    Answers,
    ContextFigures,
    Figures,
    Position,
    TierSteps,
    Turn,
    contexts_of,
    decode_seconds,
    figures_of,
    positions_of,
    tiers_of,
)
from speccompile.bench.method_names import PLAIN, TRANSFORMERS
from speccompile.bench.results import Answered, Results
from speccompile.traces.calibration import CalibrationCurve

#: Name of the group of all machines.
ALL_MACHINES = "all machines"


@dataclass(frozen=True)
class LineSummary:
    """A line of the table.

    Args:
        facts: how it decodes.
        categories: figures by category; empty if there is only one.
        same, compared: number of answers with the tokens of K=0, and of those compared. Both are 0 where the tokens
            need not be equal: draws of transformers, and transformers with other weights or KV.
        agreement: mean share of the tokens of K=0 before the first difference; None if no answer was compared.
        drafters: for each drafter, the numbers of its draft tokens and of the accepted ones.
    """

    name: str
    facts: Mapping[str, Any]
    figures: Figures
    categories: Mapping[str, Figures]
    positions: tuple[Position, ...]
    contexts: tuple[ContextFigures, ...]
    tiers: tuple[TierSteps, ...]
    calibration: CalibrationCurve | None
    same: int
    compared: int
    agreement: float | None
    drafters: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class MachineSummary:
    """Lines measured on one kind of machine, or on all of them.

    Args:
        kernels: tokens per second of K=0 over those of transformers; None if that was not measured.
    """

    name: str
    facts: Mapping[str, Any]
    kernels: Interval | None
    lines: tuple[LineSummary, ...]


@dataclass(frozen=True)
class BenchSummary:
    """Summary of all results."""

    settings: Mapping[str, Any]
    machines: tuple[MachineSummary, ...]

    def as_json(self) -> dict[str, Any]:
        """All figures, as data for JSON."""
        return asdict(self)


def summarize(results: Results) -> BenchSummary:
    """Summarize results. Of several rounds, the answer with the median decode time stands for a turn."""
    facts = {str(run.machine["name"]): run.machine for run in results.runs}
    machines = [_machine(name, facts[name], {name: own}, results) for name, own in results.answers.items() if own]
    if len(machines) > 1:
        machines.append(_machine(ALL_MACHINES, {}, results.answers, results))
    return BenchSummary(results.settings, tuple(machines))


def _machine(
    name: str, facts: Mapping[str, Any], answers: Mapping[str, Sequence[Answered]], results: Results
) -> MachineSummary:
    turns: dict[str, dict[Turn, list[Answered]]] = {line: defaultdict(list) for line in results.lines}
    for machine, own in answers.items():
        for answered in own:
            turns[answered.line][machine, answered.prompt, answered.turn].append(answered)
    # With an even number of rounds it is the slower one in the middle.
    medians: dict[str, Answers] = {
        line: {turn: sorted(rounds, key=decode_seconds)[len(rounds) // 2] for turn, rounds in found.items()}
        for line, found in turns.items()
        if found
    }
    plain = medians.get(PLAIN, {})
    lines = [_line(line, own, plain, turns[line], results) for line, own in medians.items()]
    by_name = {line.name: line for line in lines}
    kernels = None
    if TRANSFORMERS in by_name and (speed := by_name[TRANSFORMERS].figures.speed) is not None and speed.value > 0:
        low, high = (None if end is None else 1 / end for end in (speed.high, speed.low))
        kernels = Interval(1 / speed.value, low, high)
    return MachineSummary(name, facts, kernels, tuple(lines))


def _line(
    name: str, answers: Answers, plain: Answers, rounds: Mapping[Turn, Sequence[Answered]], results: Results
) -> LineSummary:
    categories: dict[str, dict[Turn, Answered]] = defaultdict(dict)
    drafters: dict[str, tuple[int, int]] = {}
    for turn, answered in answers.items():
        categories[answered.category][turn] = answered
        for drafter, (drafts, accepted) in answered.answer.drafts_by.items():
            before = drafters.get(drafter, (0, 0))
            drafters[drafter] = before[0] + drafts, before[1] + accepted
    requests = [answered.answer.steps for answered in answers.values()]
    compared = rounds.keys() & plain.keys() if name != PLAIN and _comparable(name, results.settings) else set()
    pairs = [(each, plain[turn]) for turn in compared for each in rounds[turn]]
    return LineSummary(
        name=name,
        facts=results.lines[name],
        figures=figures_of(answers, plain),
        categories={key: figures_of(own, plain) for key, own in categories.items()} if len(categories) > 1 else {},
        positions=positions_of(requests),
        contexts=contexts_of(answers.values(), plain.values()),
        tiers=tiers_of(requests),
        calibration=calibration_of(requests),
        same=sum(each.answer.token_ids == base.answer.token_ids for each, base in pairs),
        compared=len(pairs),
        agreement=sum(_agreement(each, base) for each, base in pairs) / len(pairs) if pairs else None,
        drafters=drafters,
    )


def _agreement(answered: Answered, plain: Answered) -> float:
    """Share of the tokens of ``plain`` before the first that differs."""
    ids, expected = answered.answer.token_ids, plain.answer.token_ids
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(ids, expected, strict=False))
    return sum(1 for _ in equal) / len(expected)


def _comparable(line: str, settings: Mapping[str, Any]) -> bool:
    """Whether a line emits the tokens of K=0 if nothing is wrong."""
    of_the_same_model = (settings["weights"], settings["kv"], settings["temperature"]) == ("same", "same", 0)
    return line != TRANSFORMERS or of_the_same_model
