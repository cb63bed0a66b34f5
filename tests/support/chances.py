"""Chances of drafts, read from the tokens that ``AcceptanceEstimator`` expects."""

from __future__ import annotations

from collections.abc import Sequence

from speccompile.policies.acceptance import AcceptanceEstimator
from speccompile.policies.base import Row


def survival(acceptance: AcceptanceEstimator, rows: Sequence[Row]) -> list[list[float]]:
    """The probability that j drafts or more are accepted, for j = 1 .. the draft length of each row."""
    lens = range(max(row.draft_len for row in rows) + 1)
    expected = acceptance.emitted(rows, lens)
    return [[expected[j][n] - expected[j - 1][n] for j in lens[1:]] for n in range(len(rows))]
