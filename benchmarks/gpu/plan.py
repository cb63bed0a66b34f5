"""What is measured, in which order: what matters most comes first, since time may run out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.budget import Figures, Part
from benchmarks.gpu.engine import measure_engine
from benchmarks.gpu.linears import measure_linears
from benchmarks.gpu.loops import measure_loops
from benchmarks.gpu.memory import measure_memory
from benchmarks.gpu.phases import measure_phases
from benchmarks.gpu.profile import profile_steps
from benchmarks.gpu.rates import AtRate
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.steps import measure_shares, measure_steps
from benchmarks.gpu.swaps import measure_swaps
from benchmarks.gpu.texts import compare_texts
from benchmarks.gpu.wrapped import FromModel, WrappedModel
from speccompile.heads import Eagle3Head

_FEW_TOKENS = 64
_NOT_ROUNDED = "bfloat16"
_SMALL, _LARGE = "small", "large"

#: The parts of a group, which share a model.
Parts = Callable[[Settings, torch.device], list[Part]]


@dataclass(frozen=True)
class Group:
    """Parts that one process measures.

    Args:
        least: seconds without which it is not begun.
        most: seconds after which the process is ended.
        timed: whether it measures times, so that nothing may run beside it.
    """

    name: str
    least: float
    most: float
    parts: Parts
    timed: bool = True


def _first(settings: Settings, device: torch.device) -> list[Part]:
    """Whether sequences with accepted drafts are right, what share of the bandwidth K=0 reaches, and what drawing
    costs."""
    large = WrappedModel(settings.large, settings, device, tiers=settings.few_lens, sampling=True)

    def bandwidth(figures: Figures) -> None:
        figures["bytes_per_second"] = large.bandwidth

    def linears(figures: Figures) -> None:
        given = {"rows": (1, 8), "bandwidth": large.bandwidth, "rounds": settings.rounds}
        measure_linears(settings.large, device, settings.dtype, figures, **given)

    return [
        *_texts_of_mode("ngram", settings, device),
        Part("copy bandwidth", 1, 20, bandwidth),
        Part("linears", 2, 60, linears),
        *_named(large, ("wrap", 10, 150, large.wrap), ("steps", 5, 30, partial(_steps, large, (1,)))),
        *_named(
            large,
            ("texts", 5, 40, partial(_texts, large, False)),
            ("kernels", 5, 30, partial(_kernels, large)),
            ("engine", 5, 40, partial(_engine, large)),
            ("swaps", 2, 20, partial(_swaps, large)),
        ),
    ]


def _texts_of_mode(mode: str, settings: Settings, device: torch.device) -> list[Part]:
    """In float32 sequences must be equal. The vocabulary is small, so that lookups draft."""
    shape = replace(settings.small, vocab=_FEW_TOKENS)
    lens = (0,) if mode == "none" else tuple(length for length in settings.draft_lens if length <= 7)
    small = WrappedModel(shape, settings, device, dtype=torch.float32, mode=mode, tiers=lens, sampling=True)
    return _named(
        small, ("wrap", 10, 80, small.wrap), ("texts", 5, 40, partial(_texts, small, True)), kind=f"float32, {mode}"
    )


def _rounded(form: str, settings: Settings, device: torch.device) -> list[Part]:
    """Few layers: rounding all of them would take the time of everything else."""
    shape = replace(settings.large, layers=settings.shallow_layers)
    is_rounded = form != _NOT_ROUNDED
    # A rehearsal needs the compiled C++ ops.
    backend = "inductor" if is_rounded and device.type == "cpu" else settings.backend
    options = {"weights": form} if is_rounded else {}
    model = WrappedModel(shape, settings, device, tiers=settings.few_lens, backend=backend, **options)
    return _named(
        model,
        ("wrap", 10, 60, model.wrap),
        ("steps", 2, 20, partial(_steps, model, (1,))),
        ("kernels", 2, 20, partial(_kernels, model)),
        kind=f"{settings.shallow_layers} layers, {form}",
    )


def _head(settings: Settings, device: torch.device) -> list[Part]:
    """A head with random weights: what its drafts cost."""

    head = FromModel(partial(Eagle3Head.random, draft_vocab_size=settings.head_vocab))
    lens = tuple(sorted({0, *settings.few_lens, settings.few_lens[-1] // 2}))
    large = WrappedModel(settings.large, settings, device, mode="eagle3_one_model", tiers=lens, draft=head)
    return _named(
        large,
        ("wrap", 10, 100, large.wrap),
        ("steps", 2, 20, partial(_steps, large, (1,))),
        ("texts", 5, 40, partial(_texts, large, False)),
        ("kernels", 5, 30, partial(_kernels, large)),
        kind="EAGLE-3 head",
    )


def _rows(settings: Settings, device: torch.device) -> list[Part]:
    """Many rows, and all draft lengths."""
    return _at_rate(WrappedModel(settings.large, settings, device, **_all_tiers(settings)), "all tiers")


def _small(settings: Settings, device: torch.device) -> list[Part]:
    small = WrappedModel(settings.small, settings, device, **_all_tiers(settings))

    def memory(figures: Figures) -> None:
        measure_memory(small.model, figures, draft_lens=settings.draft_lens, sizes=small.sizes)

    parts = _at_rate(small, "all tiers")
    return [*parts, *_named(small, ("memory", 10, 100, memory), kind="all tiers")]


def _loops(which: str, settings: Settings, device: torch.device) -> list[Part]:
    """Whole loops beside ours, by hand and by transformers."""
    shape = {_SMALL: settings.small, _LARGE: settings.large}[which]
    model = WrappedModel(shape, settings, device, tiers=settings.few_lens, acceptance=AtRate())
    return _named(
        model,
        ("wrap", 10, 60, model.wrap),
        ("loops", 20, 120, partial(_beside, model)),
        kind=f"loops, {which}" if settings.small == settings.large else "loops",
    )


#: In the order of their worth.
GROUPS = (
    Group("first", 20, 240, _first),
    *(Group(f"texts, {mode}", 20, 150, partial(_texts_of_mode, mode), timed=False) for mode in ("none", "early_exit")),
    *(Group(f"rounded, {form}", 15, 60, partial(_rounded, form)) for form in (_NOT_ROUNDED, "int8", "int4")),
    Group("head", 20, 120, _head),
    Group("small", 20, 150, _small),
    Group("rows", 30, 240, _rows),
    *(Group(f"loops, {which}", 30, 150, partial(_loops, which)) for which in (_SMALL, _LARGE)),
)


def _all_tiers(settings: Settings) -> dict[str, Any]:
    rows = max(settings.row_counts)
    return {"tiers": settings.draft_lens, "max_batch": rows, "acceptance": AtRate(), "policy": "cost"}


def _at_rate(model: WrappedModel, kind: str) -> list[Part]:
    rows = model.settings.row_counts
    return _named(
        model,
        ("wrap", 10, 200, model.wrap),
        ("steps", 5, 60, partial(_steps, model, rows)),
        ("outside the target", 5, 40, partial(_shares, model)),
        ("swaps", 2, 20, partial(_swaps, model)),
        ("phases", 10, 60, partial(_phases, model)),
        kind=kind,
    )


def _named(
    model: WrappedModel, *parts: tuple[str, float, float, Callable[[Figures], None]], kind: str = ""
) -> list[Part]:
    title = f"{model.shape.name}, {kind}" if kind else model.shape.name
    return [Part(f"{title}: {name}", least, most, run) for name, least, most, run in parts]


def _steps(of: WrappedModel, rows: tuple[int, ...], figures: Figures) -> None:
    context, rounds = of.settings.context, of.settings.rounds
    measure_steps(of.spec, figures, row_counts=rows, context=context, rounds=rounds, bandwidth=of.bandwidth)


def _texts(of: WrappedModel, drawn: bool, figures: Figures) -> None:
    compare_texts(of.spec, of.shape.vocab, figures, new_tokens=of.settings.text_tokens, drawn=drawn)


def _kernels(of: WrappedModel, figures: Figures) -> None:
    profile_steps(of.spec, figures, draft_lens=of.spec.engine.draft_lens, context=of.settings.context)


def _engine(of: WrappedModel, figures: Figures) -> None:
    settings = of.settings
    measure_engine(
        of.spec,
        of.shape.vocab,
        figures,
        steps=settings.engine_steps,
        context=settings.context,
        rounds=settings.rounds,
    )


def _shares(of: WrappedModel, figures: Figures) -> None:
    settings = of.settings
    lens = tuple(dict.fromkeys((settings.draft_lens[0], *settings.draft_lens[-2:])))
    measure_shares(
        of.spec,
        figures,
        row_counts=settings.row_counts[:2],
        draft_lens=lens,
        context=settings.context,
        rounds=settings.rounds,
    )


def _swaps(of: WrappedModel, figures: Figures) -> None:
    settings = of.settings
    measure_swaps(of.spec, figures, count=settings.swaps, rows=1, context=settings.context, rounds=settings.rounds)


def _phases(of: WrappedModel, figures: Figures) -> None:
    settings = of.settings
    measure_phases(
        of.spec,
        figures,
        rows=settings.phase_rows,
        tokens=settings.phase_tokens,
        prompt=settings.phase_prompt,
        policy=of.policy,
    )


def _beside(of: WrappedModel, figures: Figures) -> None:
    settings = of.settings
    measure_loops(
        of.spec,
        of.model,
        figures,
        rows=1,
        draft_len=settings.loop_draft_len,
        rate=0.8,
        new_tokens=settings.new_tokens,
        drafted_tokens=settings.drafted_tokens,
        rounds=max(1, settings.rounds // 5),
        compiled=settings.compiled,
    )
