"""The launches of a step on CUDA, counted where there is none."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.without_gpu.bodies import cuda_code
from benchmarks.without_gpu.hopper import hopper
from benchmarks.without_gpu.models import Model
from speccompile import Adapters, Speculator, wrap
from speccompile.backends import Eager, register_backend
from speccompile.errors import SpecCompileError
from speccompile.graph.keys import Kind
from speccompile.lowering.kernel_list import KernelCall, kernels_called
from speccompile.lowering.kernels import ON_CUDA, Kernels
from speccompile.lowering.tier import Tier
from speccompile.utils import storage
from speccompile.utils.devices import TRAITS

TIERS = (0, 7)
BACKEND = "cuda steps on a cpu"


class _CudaSteps(Eager):
    """Builds the steps that CUDA runs, and runs them op by op on a CPU."""

    def choose_kernels(self, info: Any) -> Kernels:
        """CUDA's."""
        return ON_CUDA


register_backend(BACKEND, _CudaSteps)


@dataclass(frozen=True)
class Variant:
    """A kind of step, and the options of the wrap that has it."""

    name: str
    kind: Kind = "greedy"
    options: Mapping[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant("greedy"),
    Variant("drawn", "drawn"),
    Variant("sampled", "sampled"),
    Variant("int8", options={"weights": "int8"}),
    Variant("int4", options={"weights": "int4"}),
    Variant("LoRA", options={"adapters": Adapters(count=4)}),
)


@dataclass(frozen=True)
class Launches:
    """``outside`` of the decoder layers; ``layer`` is a mean over all of them."""

    outside: int
    layers: int
    layer: float

    @property
    def total(self) -> int:
        """Launches of a whole step."""
        return self.outside + round(self.layers * self.layer)


@contextlib.contextmanager
def cuda_traits() -> Iterator[None]:
    """In this context the package builds for a CPU what it builds for CUDA."""
    traits = patch.dict(TRAITS, {"cpu": replace(TRAITS["cuda"], asynchronous=False)})
    # Stored captures of models on a CPU are those of its own traits.
    with (
        tempfile.TemporaryDirectory() as folder,
        traits,
        patch.object(storage, "cache_dir", lambda: Path(folder)),
        patch.object(torch.accelerator, "empty_cache", lambda: None),
    ):
        yield


@contextlib.contextmanager
def wrapped(model: Model, **options: Any) -> Iterator[Speculator]:
    """The small model with the steps of CUDA.

    Raises:
        SpecCompileError: as ``wrap``.
    """
    with (
        cuda_traits(),
        wrap(model.small(), "ngram", tiers=TIERS, max_batch=1, max_len=256, backend=BACKEND, **options) as spec,
    ):
        yield spec


def calls_of(tier: Tier) -> tuple[KernelCall, ...]:
    """The list that ``spec.kernels()`` would return on an H100. For use in :func:`wrapped`."""
    code = cuda_code(tier.graph)
    with hopper():
        return kernels_called(tier.graph, "cuda", code)


def launches_of(tier: Tier, stands_for: tuple[int, ...]) -> Launches:
    """The launches of a step of the published model."""
    calls = calls_of(tier)
    outside, inside = 0, 0
    bodies = {call.name: call.calls for call in calls if call.kind == "body"}
    for call in calls:
        if call.kind in ("body", "plain"):
            continue
        layers = tier.graph.bodies[call.caller].layers if call.caller in bodies else ()
        if layers:
            inside += call.calls * sum(stands_for[index] for index in layers)
        else:
            outside += call.calls * bodies.get(call.caller, 1)
    return Launches(outside, sum(stands_for), inside / sum(stands_for))


def count(model: Model, variants: tuple[Variant, ...] = VARIANTS) -> dict[str, dict[int, Launches] | str]:
    """For each variant the launches of a step by draft length, or why there are none."""
    found: dict[str, dict[int, Launches] | str] = {}
    for options, group in _grouped(variants):
        try:
            with wrapped(model, **options) as spec:
                found |= {variant.name: _steps_of(spec, variant.kind, model) for variant in group}
        except SpecCompileError as error:
            found |= {variant.name: str(error) for variant in group}
    return {variant.name: found[variant.name] for variant in variants}


def _steps_of(spec: Speculator, kind: Kind, model: Model) -> dict[int, Launches]:
    """By draft length; empty where the wrap has no steps of that kind."""
    if kind not in spec.engine.kinds:
        return {}
    spec.engine.table.prepare(kind)
    return {draft_len: launches_of(spec.engine.tiers[draft_len, 1, kind], model.stands_for) for draft_len in TIERS}


def _grouped(variants: tuple[Variant, ...]) -> list[tuple[Mapping[str, Any], list[Variant]]]:
    """Variants of equal options, which one wrap has."""
    groups: list[tuple[Mapping[str, Any], list[Variant]]] = []
    for variant in variants:
        group = next((group for options, group in groups if options == variant.options), None)
        if group is None:
            groups.append((variant.options, group := []))
        group.append(variant)
    return groups
