"""Runs in a report: the times of steps and of their parts, drafts, and traces."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.report.program_data import Region


@dataclass(frozen=True)
class RegionCost:
    """Cost of a region. ``floor_ms`` is the time to read its bytes from memory."""

    region: Region
    ms: float | None
    nbytes: int
    floor_ms: float | None


@dataclass(frozen=True)
class Measured:
    """Measured steps of one tier, over the dummy slot.

    Args:
        step_ms: the fastest of ``runs`` runs, which alternate with those of the other tiers.
        context: tokens of each row.
        how: description of the measurement of the parts.
    """

    step_ms: float
    median_ms: float
    runs: int
    context: int
    how: str


@dataclass(frozen=True)
class Decoded:
    """Prompts that were decoded with the policy fixed to one tier.

    Args:
        tokens: number of tokens that steps emitted.
        acceptance_length: over all steps. If a lookup finds no drafts, a smaller tier runs.
        own_steps, own_length: number of the steps that ran this tier, and their acceptance length; None if it did not
            run.
        tier_steps: numbers of steps by the name of the tier that ran.
        step_ms: mean time of a step with the host's part, after the first token.
    """

    prompts: int
    tokens: int
    steps: int
    acceptance_length: float
    own_steps: int
    own_length: float | None
    tier_steps: dict[str, int]
    step_ms: float
    tokens_per_second: float
    per_position: tuple[float, ...]


@dataclass(frozen=True)
class AcceptanceCounts:
    """Statistics of the requests that the engine has run: by draft position, and by name of the tier."""

    acceptance_length: float
    steps: int
    emitted: int
    proposed_at: tuple[int, ...]
    accepted_at: tuple[int, ...]
    tier_steps: dict[str, int]
    tier_seconds: dict[str, float]


@dataclass(frozen=True)
class TraceStep:
    """A step of a recorded trace, an entry for each row."""

    draft_len: int
    requests: tuple[int, ...]
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    ms: float | None


@dataclass(frozen=True)
class TraceReport:
    """Steps of a recorded trace. ``name`` is its file, or a description of the decoded prompts."""

    name: str
    draft_lens: tuple[int, ...]
    steps: tuple[TraceStep, ...]
