"""Survey of families: whether a tiny model speculates with the text of transformers, or the reason against it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import itertools
import logging
import random
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from speccompile import Speculator, wrap
from speccompile.errors import CannotBeTiny, SpecCompileError, error_line
from speccompile.graph_capture.attention import Route
from speccompile.runtime.check import first_difference, transformers_greedy
from speccompile.tools.families.family import Family
from speccompile.tools.families.tiny import TEXT_VOCAB, tiny_model

TIERS = (0, 1, 3)
ROWS = 4
# Prompts and new tokens are each longer than the sum of the windows of tiny models.
NEW_TOKENS = 48
PROMPT_LENGTHS = (40, 33, 3, 28)
# Tokens in the pattern of a periodic prompt. The next prompt is tried if hardly any draft was accepted after one.
PERIODS = (6, 5, 7, 6, 5, 7)
ACCEPTED = 1.1

_FIRST_TEXT_TOKEN = 5
_PAD = 0
_CPU = torch.device("cpu")


class Verdict(enum.StrEnum):
    """Result of a family.

    ``REFUSED``: ``wrap`` reports what it does not support. ``NOT_MADE``: no tiny model exists, or transformers cannot
    generate with it. ``WRONG`` and ``BROKEN`` are faults of this package: a different text, or an error of a class
    outside of :mod:`speccompile.errors`.
    """

    EXACT = "exact"
    REFUSED = "refused"
    NOT_MADE = "not made"
    WRONG = "wrong"
    BROKEN = "broken"


@dataclasses.dataclass(frozen=True)
class FamilyRow:
    """One line of the table.

    Args:
        family, model_class: names.
        verdict: result of the family.
        route: how its attention was captured; None if it was not.
        acceptance_length: of the largest tier after a periodic prompt, if the text is exact.
        reason: why the text is not exact, or why attention is not the attention op.
        error: class of the error that the reason describes.
        seconds: duration of the survey of this family.
    """

    family: str
    model_class: str
    verdict: Verdict
    route: Route | None = None
    acceptance_length: float | None = None
    reason: str = ""
    error: str | None = None
    seconds: float = 0.0


def survey(family: Family, *, backend: str = "eager", device: torch.device = _CPU) -> FamilyRow:
    """Compare the text of the family's tiny model on ``device`` with that of transformers' ``generate``.

    Batches are ragged, drafts are n-grams, and tiers alternate at random. Errors are caught and reported in the row.
    """
    started = time.perf_counter()
    with _quiet():
        row = _surveyed(family, backend, device)
    return dataclasses.replace(row, seconds=time.perf_counter() - started)


def _surveyed(family: Family, backend: str, device: torch.device) -> FamilyRow:
    row = FamilyRow(family.name, family.model_class.__name__, Verdict.EXACT)

    def ended(verdict: Verdict, reason: str, error: Exception | None = None) -> FamilyRow:
        name = None if error is None else type(error).__name__
        return dataclasses.replace(row, verdict=verdict, reason=reason, error=name)

    try:
        try:
            model = tiny_model(family)
            model.to(str(device))  # type: ignore[arg-type]
            spec = wrap(
                model,
                "ngram",
                tiers=TIERS,
                max_batch=ROWS,
                max_len=max(PROMPT_LENGTHS) + NEW_TOKENS,
                backend=backend,
                policy=RandomTier(),
            )
        except CannotBeTiny as error:
            return ended(Verdict.NOT_MADE, str(error), error)
        except SpecCompileError as error:
            return ended(Verdict.REFUSED, str(error), error)
        with spec:
            row = dataclasses.replace(row, route=spec.route, reason=spec.route_reason)
            _check_batches(spec, model)
            acceptance_length = _acceptance_length(spec, model)
    except _GenerateFails as failure:
        return ended(Verdict.NOT_MADE, str(failure), failure.error)
    except _Differs as difference:
        return ended(Verdict.WRONG, str(difference))
    except Exception as error:
        return ended(Verdict.BROKEN, f"{error_line(error)} ({_place(error)})", error)
    if acceptance_length == 1.0:
        never = f"no draft was accepted after {len(PERIODS)} periodic prompts"
        row = dataclasses.replace(row, reason="; ".join(reason for reason in (never, row.reason) if reason))
    return dataclasses.replace(row, acceptance_length=acceptance_length)


class RandomTier:
    """Policy that chooses tiers at random, with the same sequence in every run."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def choose(self, live_rows: int) -> int:
        return self._random.choice(TIERS)


class _Differs(Exception):
    """The text differs from that of transformers."""


class _GenerateFails(Exception):
    """transformers cannot generate, and there is no text to compare with."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"transformers' own generate fails on the tiny model: {error_line(error)}.")
        self.error = error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress all warnings and prints. They would concern sizes that no user chose."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _check_batches(spec: Speculator, model: PreTrainedModel) -> None:
    """Check batches of 1 to ``ROWS`` rows of different lengths. Raises _Differs or _GenerateFails."""
    prompts = _prompts()
    texts = [_expected(model, prompt) for prompt in prompts]
    order = itertools.cycle(range(len(prompts)))
    for rows in range(1, ROWS + 1):
        chosen = list(itertools.islice(order, rows))
        _check(spec, model, [prompts[i] for i in chosen], [texts[i] for i in chosen])


def _acceptance_length(spec: Speculator, model: PreTrainedModel) -> float:
    """Largest acceptance length of the largest tier over the periodic prompts. Raises as ``_check_batches``."""
    spec.set_tier(max(TIERS))
    best = 0.0
    for seed, period in enumerate(PERIODS):
        prompt = _periodic(period, max(PROMPT_LENGTHS), seed)
        spec.stats.reset()
        _check(spec, model, [prompt], [_expected(model, prompt)])
        best = max(best, spec.stats.acceptance_length)
        if best >= ACCEPTED:
            break
    return best


def _prompts() -> list[list[int]]:
    """Prompts with and without repetition, of different lengths."""
    long, random_long, random_short, short = PROMPT_LENGTHS
    return [
        _periodic(6, long, seed=0),
        _periodic(random_long, random_long, seed=1),
        _periodic(random_short, random_short, seed=2),
        _periodic(3, short, seed=3),
    ]


def _periodic(period: int, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    pattern: list[int] = torch.randint(_FIRST_TEXT_TOKEN, TEXT_VOCAB, (period,), generator=generator).tolist()
    return list(itertools.islice(itertools.cycle(pattern), length))


def _expected(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    try:
        return transformers_greedy(model, prompt, NEW_TOKENS, [])
    except Exception as error:
        raise _GenerateFails(error) from error


def _check(
    spec: Speculator, model: PreTrainedModel, prompts: Sequence[list[int]], expected: Sequence[list[int]]
) -> None:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[_PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    texts = spec.generate(ids, mask, max_new_tokens=NEW_TOKENS, pad_token_id=_PAD)[:, width:].tolist()
    for index, (prompt, reference, computed) in enumerate(zip(prompts, expected, texts, strict=True)):
        difference = first_difference(model, index, prompt, reference, computed)
        if difference is not None:
            rows = f"{len(prompts)} rows" if len(prompts) > 1 else "1 row"
            raise _Differs(f"not the text of transformers: in a batch of {rows}, {difference}")


def _place(error: Exception) -> str:
    """File and line of this package from which the error was raised."""
    root = Path(__file__).parents[2]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(root)]
    return f"{Path(frames[-1].filename).relative_to(root.parent).as_posix()}:{frames[-1].lineno}"
