"""Attacks on a server, each one function with the decorator ``attack``."""

from __future__ import annotations

from benchmarks.attacks import bodies, connections, fields, leaving, schemas
from benchmarks.attacks.attack import CLOSED, HUNG, LEFT, Attack, Outcome, Target

ATTACKS = [
    found
    for module in (bodies, connections, fields, leaving, schemas)
    for found in vars(module).values()
    if isinstance(found, Attack)
]

__all__ = ["ATTACKS", "CLOSED", "HUNG", "LEFT", "Attack", "Outcome", "Target"]
