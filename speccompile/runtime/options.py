"""Options by which the engine shares its time and memory among requests, and requirements of its executables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineOptions:
    """Arguments of ``wrap`` that only the engine reads.

    Args:
        max_waiting: most requests that wait for a slot.
        prefill_budget: prompt tokens between two decode steps while tokens are watched. None means the device's
            (:class:`~speccompile.utils.devices.DeviceTraits`), which may measure their cost.
        prefix_reuse: whether the KV of a known beginning of a prompt is reused.
        state_checkpoints: tokens between two checkpoints of a recurrent state; None keeps none.
    """

    max_waiting: int = 1024
    prefill_budget: int | None = None
    prefix_reuse: bool = True
    state_checkpoints: int | None = None


@dataclass(frozen=True)
class StepTraits:
    """Requirements of a wrap's executables on the engine.

    Args:
        ready: the drafter's proposals are in the arena when a step ends, so the smallest tier that serves them runs.
        one_shape: all steps and chunks have one shape, so no bit of a sequence depends on other requests.
        reads_dead_positions: attention also reads positions of a slot after the end of its sequence, and masks them.
        captured: executables run once over the arena when they are built (CUDA graphs), so no step may run meanwhile.
        reach: most tokens of a sequence that the mode's network reads; None means no limit.
        segments: a tier's drafter continues that of the next smaller tier, and may be stopped between them.
        drawn_options: options of requests that run executables of the kind ``drawn``; else empty.
        prompts_differ: the same tokens leave another state within a prompt than after it.
        drafts_known: the drafts of a step are known before it, as chains: the host can ask a guide about them.
        network_on_demand: ``ready``, and separate executables of a network draft for the rows without a proposal.
    """

    ready: bool = False
    one_shape: bool = False
    reads_dead_positions: bool = False
    captured: bool = False
    reach: int | None = None
    segments: bool = False
    prompts_differ: bool = False
    network_on_demand: bool = False
    drafts_known: bool = False
    drawn_options: frozenset[str] = frozenset()
