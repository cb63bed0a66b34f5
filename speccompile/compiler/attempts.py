"""Builds a model in attempts, one after the other, until one passes its checks.

An attempt chooses the routes by which the model may be captured, whether a stored capture may be used, and the kernels
of the steps. :func:`next_attempt` lists which attempt follows which failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from speccompile.adapters.own_forward import adapted, trial_adapter
from speccompile.compiler.config import BuildConfig
from speccompile.compiler.determinism import corners, everywhere, prove_deterministic, prove_trees, tree_corners
from speccompile.compiler.frontend import BuiltStages, build_stages, reach_of
from speccompile.compiler.recorded_check import RecordedCheck
from speccompile.compiler.seconds import Seconds
from speccompile.errors import (
    CaptureError,
    CaptureMismatch,
    DeterministicUnavailable,
    DeviceMemoryFull,
    FreeOriginalsUnavailable,
    LoweringError,
    PassError,
    PassFailed,
    SpecCompileError,
    UnsupportedModel,
)
from speccompile.graph.stage import CAPTURE
from speccompile.graph.step_graph import Route, StepGraph
from speccompile.graph_capture.attention import ROUTES
from speccompile.graph_capture.check import check_capture
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.graph_capture.packed_forward import inputs_unrounded
from speccompile.graph_capture.rotary import settle_rotary
from speccompile.graph_capture.store import CaptureStore
from speccompile.lowering.backends import Eager, lower
from speccompile.lowering.kernels import STOCK, Kernels
from speccompile.ops.cpu.free_originals import FreedOriginals
from speccompile.ops.cpu.rounded import check_kernels
from speccompile.ops.in_cpp import libraries_of
from speccompile.passes.target.tree_bodies import of_trees
from speccompile.utils.progress import task
from speccompile.utils.storage import Storage

OTHER_ATTENTION = "its attention is not what the attention op computes: the capture check found a difference"


@dataclass(frozen=True)
class Attempt:
    """One way to build.

    Args:
        stored: whether a stored capture may be used.
        routes: the routes by which the model may be captured, best first.
        freed: receives the packed weights; None leaves the model's own in place.
        mismatch: why the capture by an earlier route failed its check.
    """

    config: BuildConfig
    stored: bool = True
    routes: Sequence[Route] = ROUTES
    freed: FreedOriginals | None = None
    mismatch: CaptureMismatch | None = None


@dataclass(frozen=True)
class CheckedStages:
    """Stages that passed the capture check, and the largest difference that the check found."""

    stages: BuiltStages
    difference: float


class KernelsUnavailable(LoweringError):
    """The C++ ops, which are compiled during the capture, could not be built. ``kernels`` are those without them."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels.reason)
        self.kernels = kernels


def first_that_passes(
    model: PreTrainedModel, info: ModelInfo, attempt: Attempt, storage: Storage, seconds: Seconds
) -> CheckedStages:
    """Build by ``attempt``, then by the attempts that follow it, until one passes all checks.

    Raises:
        CaptureError, CaptureMismatch, PassError, LoweringError, DeterministicUnavailable, FreeOriginalsUnavailable.
    """
    settle_rotary(model)
    # Its key describes the model as it is now: an attempt may free weights.
    store = CaptureStore(model, info, storage, attempt.config.kv)
    while True:
        built = None
        try:
            with seconds.of("capture and passes"):
                built = build_stages(
                    model,
                    info,
                    attempt.config,
                    stored=attempt.stored,
                    routes=attempt.routes,
                    storage=storage,
                    freed=attempt.freed,
                )
            try:
                lowered, difference = _check(model, info, attempt.config, built, storage, seconds)
            except CaptureMismatch as error:
                _blame_pass(model, info, attempt.config, built, error)
                raise
            _store(built, attempt, store, storage)
            _prove(model, built, lowered, seconds)
            return CheckedStages(built, difference)
        except (SpecCompileError, RuntimeError) as error:
            attempt = next_attempt(attempt, error, built, has_stored=store.load() is not None)


def next_attempt(attempt: Attempt, error: Exception, built: BuiltStages | None, *, has_stored: bool) -> Attempt:
    """Return the attempt that follows ``attempt``, which failed with ``error``.

    Args:
        built: its stages, None if they could not be built.
        has_stored: whether the store holds a capture of the model.

    Raises:
        Exception: no attempt follows. It is ``error``, or an earlier or clearer error.
    """
    if isinstance(error, torch.OutOfMemoryError | DeviceMemoryFull):
        # Another attempt needs as much memory.
        raise error
    config = attempt.config
    if isinstance(error, KernelsUnavailable):
        return replace(attempt, config=replace(config, kernels=error.kernels))
    if isinstance(error, DeterministicUnavailable):
        assert built is not None
        # An op between the package's kernels does not keep the order of sums. In one shape of all tiers, torch's
        # kernels keep it.
        if built.config.one_shape or config.weights.rounds:
            raise error
        if attempt.freed is not None:
            reason = "deterministic=True needs torch's own linears for this model, which read unpacked weights"
            raise FreeOriginalsUnavailable(reason=reason, advice=" or deterministic=None") from error
        return replace(attempt, stored=True, config=replace(config, kernels=STOCK))
    if attempt.mismatch is not None and isinstance(error, UnsupportedModel | CaptureError):
        raise attempt.mismatch from None
    if built is None:
        # A stored capture may not support the sizes of this wrap.
        if (
            attempt.stored
            and isinstance(error, PassError | RuntimeError)
            and not _of_users_pass(error, config)
            and (has_stored or config.network is not None)
        ):
            return replace(attempt, stored=False)
        raise error
    if isinstance(error, CaptureMismatch):
        if built.from_store:
            return replace(attempt, stored=False)
        if others := attempt.routes[attempt.routes.index(built.observed.route) + 1 :]:
            return replace(attempt, stored=False, routes=others, mismatch=error)
    raise error


def _of_users_pass(error: Exception, config: BuildConfig) -> bool:
    fields = error.fields if isinstance(error, PassError) else {}
    return fields.get("name") in {item.name for item in config.passes}


def _blame_pass(
    model: PreTrainedModel, info: ModelInfo, config: BuildConfig, built: BuiltStages, error: CaptureMismatch
) -> None:
    """Blame a failed capture check on the user's pass that changed the logits, if one did.

    Raises:
        PassFailed: after the user's first pass the graph does not compute what the model computes.
    """
    stages, names = list(built.model.values()), {item.name for item in config.passes}
    first = next((place for place, stage in enumerate(stages) if stage.name in names), None)
    if first is None:
        return
    before, reach = stages[first - 1].graph, reach_of(built.observed, built.arena)
    with inputs_unrounded(model, built.packs):
        try:
            lowered, kv = reference(before), built.config.kv
            check_capture(model, info, before, built.arena, lowered, reference, reach, built.probe, kv)
        except CaptureMismatch:
            return
    fields = error.fields
    reason = (
        f"after it the graph does not compute what {fields['model']} computes: largest logit difference "
        f"{fields['difference']:.3g} (allowed {fields['allowed']:.3g}). A pass over the model's own graph must keep "
        "its logits; to change the logits that tokens are chosen from, give the pass an anchor in a step"
    )
    raise PassFailed(name=stages[first].name, reason=reason) from error


def reference(graph: StepGraph) -> Callable[..., Any]:
    """``graph`` as the eager backend lowers it."""
    return Eager("reference").lower(graph, "the captured model")


def _check(
    model: PreTrainedModel,
    info: ModelInfo,
    config: BuildConfig,
    built: BuiltStages,
    storage: Storage,
    seconds: Seconds,
) -> tuple[Callable[..., Any], float]:
    """Lower the outlined model, and compare it and the drafter with the modules that they were captured from."""
    outlined = built.model.last.graph
    with seconds.of("compile"):
        try:
            lowered = lower(config.backend, outlined, "the captured model")
        except LoweringError:
            # The lowered code calls the C++ ops, and their build may have failed.
            _settle(config, outlined)
            raise
        _settle(config, outlined)

    recorded = RecordedCheck.of(model, config, built, storage)
    difference = recorded.read()
    if difference is None:
        difference = _compare(model, info, config, built, lowered, seconds)
        recorded.write(difference)
    if built.drafter is not None:
        with seconds.of("capture check"):
            built.drafter.check(config, built.arena)
    return lowered, difference


def _compare(
    model: PreTrainedModel,
    info: ModelInfo,
    config: BuildConfig,
    built: BuiltStages,
    lowered: Callable[..., Any],
    seconds: Seconds,
) -> float:
    """The largest difference between logits of ``lowered`` and of the model."""
    outlined = built.model.last.graph
    reach = reach_of(built.observed, built.arena)
    with (
        task("check the captured graph against the model"),
        seconds.of("capture check"),
        inputs_unrounded(model, built.packs),
    ):
        given = model, info, outlined, built.arena, lowered, reference, reach
        difference = check_capture(*given, built.probe, config.kv)
        if config.adapters is not None:
            with trial_adapter(config.adapters, built.arena, model) as pairs, adapted(model, pairs):
                own = check_capture(*given, None, config.kv)
            difference = max(difference, own)
    check_kernels(built.packs)
    return difference


def _settle(config: BuildConfig, graph: StepGraph) -> None:
    bodies = (body.module.graph for body in graph.bodies.values())
    kernels = config.kernels.settled(*libraries_of([graph.graph, *bodies]))
    if kernels.native != config.kernels.native:
        raise KernelsUnavailable(kernels)


def _store(built: BuiltStages, attempt: Attempt, store: CaptureStore, storage: Storage) -> None:
    """Keep the captures that passed the check and are not stored yet."""
    if attempt.mismatch is not None:
        built.observed = replace(built.observed, reason=OTHER_ATTENTION)
    if not built.from_store:
        store.save(built.model[CAPTURE].graph, built.observed)
    # The target's capture may be a stored one while the drafter's is new.
    drafter = built.drafter
    if drafter is not None and not drafter.from_store:
        drafter.network.store(drafter.captured, storage)


def _prove(model: PreTrainedModel, built: BuiltStages, lowered: Callable[..., Any], seconds: Seconds) -> None:
    """Prove that the bits of a context's logits do not depend on the tier, unless the wrap does not keep them.

    Without ``deterministic=True`` a failed proof turns ``deterministic`` off.

    Raises:
        DeterministicUnavailable: the bits depend on the tier, and ``deterministic`` is True.
    """
    config = built.config
    if not config.keeps_bits:
        return
    places = everywhere if config.one_shape else corners
    try:
        adapters = config.adapters
        trial = contextlib.nullcontext() if adapters is None else trial_adapter(adapters, built.arena, model)
        with task("prove that results do not depend on the tier"), seconds.of("determinism proof"), trial:
            prove_deterministic(
                built.model.last.graph,
                built.model["choose_linear"].graph,
                lowered,
                built.arena,
                places(config.max_batch, config.max_width),
            )
            if config.trees:
                outlined = built.model.last.graph
                trees = of_trees(outlined)
                sizes = dict.fromkeys(map(int, config.trees))
                prove_trees(
                    (lowered, outlined),
                    (lower(config.backend, trees, "the captured model, reading trees"), trees),
                    built.arena,
                    tree_corners(config.max_batch, sizes),
                )
    except DeterministicUnavailable:
        if config.deterministic:
            raise
        built.config = replace(config, deterministic=False)
