"""Figures of one line of the table over a group of prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

from speccompile.bench.answers import Steps
from speccompile.bench.bootstrap import Interval, interval, quotient, speed_over
from speccompile.bench.results import Answered

#: Identifies a turn: machine, conversation, index.
Turn = tuple[str, str, int]
#: Answers of one line by turn.
Answers = Mapping[Turn, Answered]
#: First tokens of the ranges of context lengths.
CONTEXTS = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768)

_EMITTED, _STEPS, _TOKENS, _SECONDS, _PLAIN_TOKENS, _PLAIN_SECONDS = range(6)


@dataclass(frozen=True)
class Figures:
    """Figures of a line. Speeds and step times exclude the first token of each answer and the time until it.

    The speed over K=0 is ``acceptance_length / step_cost``, both of the same answers.

    Args:
        tokens_per_second: decoded tokens over their time.
        first_token_ms: mean time until the first token.
        acceptance_length: mean emitted tokens per step; None for a line whose steps are not known.
        speed: tokens per second over those of K=0; None without answers of K=0.
        step_ms: mean time of a step, with the host's part; None for a line whose steps are not known.
        step_cost: ``step_ms`` over that of K=0.
    """

    prompts: int
    answers: int
    tokens: int
    steps: int
    tokens_per_second: float
    first_token_ms: float
    acceptance_length: Interval | None
    speed: Interval | None
    step_ms: float | None
    step_cost: float | None


@dataclass(frozen=True)
class Position:
    """Drafts at one position of a step.

    Args:
        reached: number of steps that had a draft there, and accepted all drafts before it.
        accepted: number of them that accepted it.
    """

    position: int
    reached: int
    accepted: int


@dataclass(frozen=True)
class ContextFigures:
    """Steps whose context has from ``low`` to below ``high`` tokens; the last range has the ``high`` None.

    Args:
        step_ms: their mean time without the host's part between steps.
        speed: acceptance length over step cost, against the steps of K=0 in the same range; None without such steps.
    """

    low: int
    high: int | None
    steps: int
    acceptance_length: float
    step_ms: float
    speed: float | None


@dataclass(frozen=True)
class TierSteps:
    """Steps of one tier, with their median time in milliseconds."""

    tier: str
    steps: int
    acceptance_length: float
    median_ms: float | None


def decode_seconds(answered: Answered) -> float:
    """Seconds from the first token to the end."""
    return answered.answer.seconds - answered.answer.first_seconds


def figures_of(answers: Answers, plain: Answers) -> Figures:
    """The figures of ``answers``, which are at least one. ``plain`` are those of K=0."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 6)
    first = []
    for turn, answered in answers.items():
        steps, own = answered.answer.steps, sums[turn[1]]
        own[_EMITTED] += sum(steps.emitted)
        own[_STEPS] += len(steps)
        first.append(answered.answer.first_seconds)
        for columns, each in (((_TOKENS, _SECONDS), answered), ((_PLAIN_TOKENS, _PLAIN_SECONDS), plain.get(turn))):
            if each is not None:
                own[columns[0]] += len(each.answer.token_ids) - 1
                own[columns[1]] += decode_seconds(each)
    table = list(sums.values())
    _, count, tokens, seconds, plain_tokens, plain_seconds = map(sum, zip(*table, strict=True))
    plain_steps = sum(len(plain[turn].answer.steps) for turn in answers if turn in plain)
    step_ms = 1e3 * seconds / count if count else None
    cost = step_ms / (1e3 * plain_seconds / plain_steps) if step_ms and plain_steps and plain_seconds else None
    compared = answers.keys() <= plain.keys() and plain_tokens > 0 and seconds > 0
    return Figures(
        prompts=len(table),
        answers=len(answers),
        tokens=sum(len(each.answer.token_ids) for each in answers.values()),
        steps=int(count),
        tokens_per_second=tokens / seconds if seconds else 0.0,
        first_token_ms=1e3 * sum(first) / len(first),
        acceptance_length=interval(table, quotient(_EMITTED, _STEPS)) if count else None,
        speed=interval(table, speed_over(_TOKENS, _SECONDS, _PLAIN_TOKENS, _PLAIN_SECONDS)) if compared else None,
        step_ms=step_ms,
        step_cost=cost,
    )


def positions_of(requests: Iterable[Steps]) -> tuple[Position, ...]:
    """Conditional acceptance by position. A tree counts as a chain as deep as its tier: if it is less deep, the missing
    drafts count as rejected."""
    reached: dict[int, int] = defaultdict(int)
    accepted: dict[int, int] = defaultdict(int)
    for steps in requests:
        for count, depth in zip(steps.accepted, steps.depths, strict=True):
            for position in range(min(depth, count + 1)):
                reached[position] += 1
                accepted[position] += position < count
    return tuple(Position(position + 1, reached[position], accepted[position]) for position in sorted(reached))


def contexts_of(answers: Iterable[Answered], plain: Iterable[Answered]) -> tuple[ContextFigures, ...]:
    """Figures by the context length of a step. Steps whose time is not known are left out."""
    own, base = _by_context(answers), _by_context(plain)
    found = []
    for index, (emitted, ms) in sorted(own.items()):
        length, step_ms = sum(emitted) / len(emitted), sum(ms) / len(ms)
        plain_ms = base.get(index, ([], []))[1]
        speed = length * sum(plain_ms) / len(plain_ms) / step_ms if plain_ms else None
        high = CONTEXTS[index + 1] if index + 1 < len(CONTEXTS) else None
        found.append(ContextFigures(CONTEXTS[index], high, len(ms), length, step_ms, speed))
    return tuple(found)


def _by_context(answers: Iterable[Answered]) -> dict[int, tuple[list[int], list[float]]]:
    """Emitted tokens and times of steps, by index of the range."""
    found: dict[int, tuple[list[int], list[float]]] = {}
    for answered in answers:
        context = answered.prompt_tokens + 1
        for emitted, ms in zip(answered.answer.steps.emitted, answered.answer.steps.ms, strict=True):
            if ms is not None:
                index = sum(context >= low for low in CONTEXTS) - 1
                counts, times = found.setdefault(index, ([], []))
                counts.append(emitted)
                times.append(ms)
            context += emitted
    return found


def tiers_of(requests: Sequence[Steps]) -> tuple[TierSteps, ...]:
    """Steps by tier, those with most steps first."""
    emitted: dict[str, list[int]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    for steps in requests:
        for tier, count, ms in zip(steps.tiers, steps.emitted, steps.ms, strict=True):
            emitted[tier].append(count)
            if ms is not None:
                times[tier].append(ms)
    found = [
        TierSteps(tier, len(counts), sum(counts) / len(counts), median(times[tier]) if times[tier] else None)
        for tier, counts in emitted.items()
    ]
    return tuple(sorted(found, key=attrgetter("steps"), reverse=True))
