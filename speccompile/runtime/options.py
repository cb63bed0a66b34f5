"""How the engine shares its time and memory among requests, and what its executables require of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineOptions:
    """Arguments of ``wrap`` that the engine alone looks at.

    Args:
        max_waiting: most requests that wait for a slot.
        prefill_budget: prompt tokens between two decode steps while tokens are watched; None measures what they cost.
        prefix_reuse: whether the KV of a known beginning of a prompt is used again.
        state_checkpoints: tokens between two checkpoints of a recurrent state; None keeps none.
    """

    max_waiting: int = 1024
    prefill_budget: int | None = None
    prefix_reuse: bool = True
    state_checkpoints: int | None = None


@dataclass(frozen=True)
class StepTraits:
    """What the executables of a wrap require of the engine.

    Args:
        ready: the drafter's proposals are in the arena when a step ends, so the smallest tier that serves them runs.
        one_shape: all steps and chunks run one shape, so that a sequence depends in no bit on what else ran.
        reads_dead_places: attention also reads places of a slot that its sequence has not reached, and masks them.
        captured: executables run once over the arena when they are built (CUDA graphs), so no step may run meanwhile.
        reach: most tokens of a sequence that the mode's network reads; None is no limit.
        segments: a tier's drafter continues that of the next smaller tier, and may be stopped between them.
        drawn_options: options of requests that run executables of the kind ``drawn``; empty if there are none.
        prompts_differ: the same tokens leave another state in a prompt than after one.
        network_on_demand: ``ready``, and a network drafts for the rows without a proposal, by executables of its own.
    """

    ready: bool = False
    one_shape: bool = False
    reads_dead_places: bool = False
    captured: bool = False
    reach: int | None = None
    segments: bool = False
    prompts_differ: bool = False
    network_on_demand: bool = False
    drawn_options: frozenset[str] = frozenset()
