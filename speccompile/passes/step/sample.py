"""The sampling pipeline in a step: logits become scores, and scores with noise become tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph, TracedProcessor
from speccompile.ops import row_contexts
from speccompile.ops.noise import DRAFTS, TOKENS
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.greedy_accept import count_agreeing, name_judged
from speccompile.passes.step.use_filters import filter_state, uses_filters
from speccompile.sampling.base import Processor
from speccompile.sampling.filters import FILTERS
from speccompile.sampling.pipeline import (
    HOST_PROCESSORS,
    LAST,
    PENALTIES,
    USED_PROCESSORS,
    WARPERS,
    WATERMARK,
    all_processors,
    in_order,
)
from speccompile.sampling.process_scores import process_scores, state_of_all
from speccompile.sampling.user import apply_processors
from speccompile.utils.devices import traits_of


@dataclass(frozen=True)
class ProcessLogits(Pass):
    """Every place's logits go through all processors, with the parameters of its slot and the drafts before it as
    its text. Leaves ``scores``, float32 ``[B, K+1, V]``."""

    name: ClassVar[str] = "process_logits"
    named_values: ClassVar[tuple[str, ...]] = ("scores",)
    looks_for: ClassVar[str] = "logits and drafts"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("step_logits", "drafts")
    provides: ClassVar[Facts] = facts("scores")

    def run(self, graph: StepGraph) -> Changes:
        if uses_filters(graph):
            graph.name_value("scores", filtered(graph, graph.values["logits"], graph.values["slots"], graph.output))
            return Changes(len(FILTERS), ", ".join(processor.name for processor in FILTERS))
        text = [graph.state(name) for name in ("tokens", "length")]
        context, row_length = graph.insert(text_and_drafts, *text, graph.values["slots"], graph.values["drafts"])
        scores = process(graph, graph.values["logits"], context, row_length, graph.output, calls_host=True)
        graph.name_value("scores", scores)
        of_wrap, later = graph.logits_processors, (*HOST_PROCESSORS, *WARPERS, *WATERMARK, *LAST)
        state = graph.layout.tensors
        order: list[Processor | TracedProcessor] = [*in_order(PENALTIES, state), *of_wrap, *in_order(later, state)]
        return Changes(len(order), ", ".join(processor.name for processor in order))


@dataclass(frozen=True)
class ExactAccept(Pass):
    """The rule ``exact``: y_i = argmax(scores_i + noise_i), accept while draft_i == y_i.

    The noise follows from seed and position, so the text is what plain decoding would have drawn. Leaves
    ``target_tokens`` ``[B, K+1]`` and ``row_accepted`` ``[B]``.
    """

    name: ClassVar[str] = "exact_accept"
    named_values: ClassVar[tuple[str, ...]] = ("target_tokens", "row_accepted")
    looks_for: ClassVar[str] = "scores and drafts"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("scores", "drafts")
    provides: ClassVar[Facts] = facts("accepted", "agreement")

    def run(self, graph: StepGraph) -> Changes:
        names = ("scores", "drafts", "row_draft_lens", "slots")
        state = [graph.state(name) for name in ("length", "temperature", "seed")]
        target_tokens, accepted = graph.insert(exact_accept, *(graph.values[name] for name in names), *state)
        return name_judged(graph, target_tokens, accepted)


def exact_accept(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    draft_lens: torch.Tensor,
    slots: torch.Tensor,
    length: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Target tokens ``[B, K+1]``, -1 where none can be chosen, and accepted draft tokens ``[B]``.

    Args:
        scores: ``[B, T, V]`` with T > K; drafts: ``[B, K]``; draft_lens, slots: ``[B]``.
        length, temperature, seed: ``[N]``.
    """
    scores = scores[:, : drafts.shape[1] + 1]
    if traits_of(scores.device).host_memory:
        state = (temperature, None, None, None, length, seed)
        target = torch.ops.speccompile.draw_filtered(scores, slots, *state, divided=True)
    else:
        target = draw(scores, length[slots], slots, temperature, seed)
    return target, count_agreeing(target, drafts, draft_lens)


def process(
    graph: StepGraph,
    logits: fx.Node,
    context: fx.Node,
    row_length: fx.Node,
    before: fx.Node,
    drafted: int = 0,
    *,
    calls_host: bool = False,
    slots: fx.Node | None = None,
) -> fx.Node:
    """Insert all processors, or the filters where rows use only these. Returns their scores, float32 like ``logits``
    ``[B, T, V]``.

    Args:
        context: ``[B, S]``; row_length: ``[B]``; see :meth:`speccompile.sampling.base.Processor.apply`.
        drafted: how many of the ``row_length`` tokens are drafts.
        calls_host: these are the target's scores: processors on the host are called, once for each token.
        slots: ``[B]``, whose parameters hold; None is those of the step's rows.
    """
    slots = graph.values["slots"] if slots is None else slots
    if uses_filters(graph):
        return filtered(graph, logits, slots, before)
    processors = all_processors(graph.layout.tensors)
    names = state_of_all(processors)
    user = graph.logits_processors
    tensors = [graph.state(name) for name in names]
    for index, processor in enumerate(user):
        tensors += [graph.constant(f"processor_{index}_{i}", value) for i, value in enumerate(processor.held)]
    # Traced as one: tracing each separately is several times slower.
    nodes = (logits, context, row_length, slots, *tensors)
    columns = graph.layout.tensors[USED_PROCESSORS].columns
    options = {"names": names, "columns": columns, "drafted": drafted, "user": user, "calls_host": calls_host}
    scores: fx.Node = graph.insert(processed, *nodes, before=before, **options)
    return scores


def filtered(graph: StepGraph, logits: fx.Node, slots: fx.Node, before: fx.Node) -> fx.Node:
    """Insert the filters; returns their scores, float32 like ``logits`` ``[B, T, V]``."""
    op = torch.ops.speccompile.filter_logits
    scores: fx.Node = graph.insert(op, logits, slots, *filter_state(graph), before=before)
    return scores


def processed(
    logits: torch.Tensor,
    context: torch.Tensor,
    row_length: torch.Tensor,
    slots: torch.Tensor,
    *tensors: torch.Tensor,
    names: tuple[str, ...],
    columns: tuple[str, ...],
    drafted: int = 0,
    user: tuple[TracedProcessor, ...] = (),
    calls_host: bool = False,
) -> torch.Tensor:
    """``tensors`` are the state tensors ``names``, then those that the user's processors hold; ``columns`` are those
    of the state with the used processors."""
    held = tensors[len(names) :]
    scores = logits.to(torch.float32, copy=True)
    state = dict(zip(names, tensors, strict=False))

    def run(*processors: Processor) -> None:
        order = [*in_order(processors, names)]
        process_scores(order, scores, context, row_length, drafted, slots, state, columns)

    warpers = (*HOST_PROCESSORS, *WARPERS, *WATERMARK) if calls_host else WARPERS
    if user:
        run(*PENALTIES)
        apply_processors(user, scores, context, row_length, held)
        run(*warpers, *LAST)
    else:
        run(*PENALTIES, *warpers, *LAST)
    return scores


def draw(
    scores: torch.Tensor,
    row_length: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens ``[B, T]``, -1 where none can be chosen, of ``scores`` ``[B, T, V]`` and the noise of the places after
    ``row_length`` ``[B]`` tokens: that of the target, or, with the step's ``start`` ``[B]``, a drafter's own.

    Args:
        temperature, seed: ``[N]``.
    """
    positions = row_length[:, None] + torch.arange(scores.shape[1], device=scores.device)
    stream = TOKENS if start is None else DRAFTS
    tokens: torch.Tensor = torch.ops.speccompile.choose(
        scores, temperature[slots], seed[slots], positions, stream, start, forbids=True
    )
    return tokens


def text_and_drafts(
    tokens: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, drafts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's committed tokens and drafts, ``[B, S]``, and the number of committed tokens ``[B]``."""
    if traits_of(tokens.device).host_memory:
        context, row_length = torch.ops.speccompile.row_contexts(tokens, length, slots, drafts)
        return context, row_length
    # On a GPU this is compiled into other kernels.
    return row_contexts.reference(tokens, length, slots, drafts)


def probabilities(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Probabilities by ``scores`` ``[B, T, V]``; at temperature 0 (``[B]``) the greatest score has the probability 1.
    NaN where nothing can be chosen.
    """
    drawn = scores.softmax(-1)
    certain = torch.zeros_like(scores).scatter(-1, scores.argmax(-1, keepdim=True), 1.0)
    undecided = scores.amax(-1, keepdim=True)
    certain = torch.where(undecided.isnan() | (undecided == float("-inf")), float("nan"), certain)
    return torch.where(temperature[:, None, None] == 0, certain, drawn)
