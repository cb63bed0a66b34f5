"""How the engine shares its time and memory among requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineOptions:
    """Arguments of ``wrap`` that the engine alone looks at.

    Args:
        max_waiting: most requests that wait for a slot.
        prefill_budget: prompt tokens between two decode steps while somebody watches; None measures what they cost.
        prefix_reuse: whether the KV of a known beginning of a prompt is used again.
    """

    max_waiting: int = 1024
    prefill_budget: int | None = None
    prefix_reuse: bool = True
