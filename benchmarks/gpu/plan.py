"""What is measured, in which order: what matters most comes first, since time may run out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.gpu.budget import Figures, Part
from benchmarks.gpu.floor import copy_bandwidth
from benchmarks.gpu.loops import measure_loops
from benchmarks.gpu.memory import measure_memory
from benchmarks.gpu.phases import measure_phases
from benchmarks.gpu.rates import AtRate
from benchmarks.gpu.shapes import LLAMA_8B, SMOLLM2, TINY, Shape, make_model
from benchmarks.gpu.steps import measure_shares, measure_steps
from benchmarks.gpu.swaps import measure_swaps
from speccompile import Speculator, wrap
from speccompile.errors import InvalidPolicy


@dataclass(frozen=True)
class Settings:
    """Sizes of all parts. ``compiled`` are options of ``torch.compile`` for the loops beside ours."""

    large: Shape
    small: Shape
    dtype: torch.dtype
    backend: str
    draft_lens: tuple[int, ...]
    row_counts: tuple[int, ...]
    max_len: int
    context: int
    rounds: int
    copied_bytes: int
    swaps: int
    loop_draft_len: int
    new_tokens: tuple[int, int]
    drafted_tokens: tuple[int, int]
    phase_rows: int
    phase_tokens: int
    phase_prompt: int
    compiled: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}


FULL = Settings(
    large=LLAMA_8B,
    small=SMOLLM2,
    dtype=torch.bfloat16,
    backend="auto",
    draft_lens=(0, 1, 3, 7, 15),
    row_counts=(1, 8, 32),
    max_len=1024,
    context=512,
    rounds=15,
    copied_bytes=4 << 30,
    swaps=10_000,
    loop_draft_len=7,
    new_tokens=(16, 80),
    drafted_tokens=(16, 400),
    phase_rows=8,
    phase_tokens=3200,
    phase_prompt=16,
    compiled={"mode": "reduce-overhead"},
)
SMOKE = Settings(
    large=TINY,
    small=TINY,
    dtype=torch.float32,
    backend="eager",
    draft_lens=(0, 1),
    row_counts=(1, 2),
    max_len=40,
    context=20,
    rounds=1,
    copied_bytes=1 << 20,
    swaps=100,
    loop_draft_len=1,
    new_tokens=(2, 4),
    drafted_tokens=(2, 4),
    phase_rows=2,
    phase_tokens=16,
    phase_prompt=4,
    compiled={"backend": "eager"},
)


class WrappedModel:
    """A model of one shape and its speculator, for the parts that share them."""

    def __init__(self, shape: Shape, settings: Settings, device: torch.device) -> None:
        self._shape, self._settings, self._device = shape, settings, device
        self._model: LlamaForCausalLM | None = None
        self._spec: Speculator | None = None
        self.policy: Any | None = None

    @property
    def model(self) -> LlamaForCausalLM:
        if self._model is None:
            settings = self._settings
            self._model = make_model(self._shape, self._device, settings.dtype, settings.max_len)
        return self._model

    @property
    def spec(self) -> Speculator:
        """Raises RuntimeError: the part that makes it did not."""
        if self._spec is None:
            raise RuntimeError("there is no speculator: the wrap failed")
        return self._spec

    @property
    def sizes(self) -> dict[str, Any]:
        settings = self._settings
        return {"max_batch": max(settings.row_counts), "max_len": settings.max_len, "backend": settings.backend}

    def wrap(self, figures: Figures) -> None:
        if self._spec is not None:
            return
        tiers = self._settings.draft_lens
        rule = AtRate()
        try:
            self._spec = wrap(self.model, "ngram", tiers=tiers, acceptance=rule, policy="cost", **self.sizes)
            self.policy = self._spec.engine.policy
        except InvalidPolicy:
            # There is none that adapts.
            self._spec = wrap(self.model, "ngram", tiers=tiers, acceptance=rule, **self.sizes)
        self._spec.set_tier(max(tiers))
        figures["backend"] = f"{self._spec.backend.name}: {self._spec.backend.reason}"
        figures["build_seconds"] = self._spec.build_seconds
        figures["arena_bytes"] = self._spec.arena.nbytes


def parts(settings: Settings, device: torch.device) -> list[Part]:
    """All of them, in order."""
    large = WrappedModel(settings.large, settings, device)
    small = large if settings.small == settings.large else WrappedModel(settings.small, settings, device)
    bandwidth: list[float] = []

    def copy(figures: Figures) -> None:
        bandwidth.append(copy_bandwidth(device, settings.copied_bytes))
        figures["bytes_per_second"] = bandwidth[0]

    def steps(of: WrappedModel, figures: Figures) -> None:
        measure_steps(
            of.spec,
            figures,
            row_counts=settings.row_counts,
            context=settings.context,
            rounds=settings.rounds,
            bandwidth=bandwidth[0],
        )

    def shares(of: WrappedModel, figures: Figures) -> None:
        measure_shares(
            of.spec,
            figures,
            row_counts=settings.row_counts[:2],
            draft_lens=tuple(dict.fromkeys((settings.draft_lens[0], *settings.draft_lens[-2:]))),
            context=settings.context,
            rounds=settings.rounds,
        )

    def swaps(of: WrappedModel, figures: Figures) -> None:
        measure_swaps(of.spec, figures, count=settings.swaps, rows=1, context=settings.context, rounds=settings.rounds)

    def memory(of: WrappedModel, figures: Figures) -> None:
        measure_memory(of.model, figures, draft_lens=settings.draft_lens, sizes=of.sizes)

    def phases(of: WrappedModel, figures: Figures) -> None:
        measure_phases(
            of.spec,
            figures,
            rows=settings.phase_rows,
            tokens=settings.phase_tokens,
            prompt=settings.phase_prompt,
            policy=of.policy,
        )

    def loops(of: WrappedModel, rows: int, figures: Figures) -> None:
        measure_loops(
            of.spec,
            of.model,
            figures,
            rows=rows,
            draft_len=settings.loop_draft_len,
            rate=0.8,
            new_tokens=settings.new_tokens,
            drafted_tokens=settings.drafted_tokens,
            rounds=max(1, settings.rounds // 5),
            compiled=settings.compiled,
        )

    big, little = f"large ({settings.large.name})", f"small ({settings.small.name})"
    return [
        Part("copy bandwidth", 1, 20, copy),
        Part(f"{big}: wrap", 10, 240, large.wrap),
        Part(f"{big}: steps", 5, 60, partial(steps, large)),
        Part(f"{big}: outside the target", 5, 40, partial(shares, large)),
        Part(f"{big}: swaps", 2, 20, partial(swaps, large)),
        Part(f"{big}: phases", 10, 60, partial(phases, large)),
        Part(f"{little}: wrap", 10, 150, small.wrap),
        Part(f"{little}: steps", 5, 40, partial(steps, small)),
        Part(f"{little}: outside the target", 5, 30, partial(shares, small)),
        Part(f"{little}: swaps", 2, 20, partial(swaps, small)),
        Part(f"{big}: loops", 20, 200, partial(loops, large, 1)),
        Part(f"{little}: memory", 10, 120, partial(memory, small)),
        Part(f"{little}: loops", 20, 200, partial(loops, small, 1)),
    ]
