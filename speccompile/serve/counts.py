"""Counts of the server itself, for ``/metrics``: those of the engine are in its statistics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counts:
    """Since the start.

    ``finished`` counts choices by ``finish_reason``, ``responses`` responses by status.
    """

    finished: Counter[str] = field(default_factory=Counter)
    responses: Counter[int] = field(default_factory=Counter)
