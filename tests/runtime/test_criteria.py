"""Stopping criteria of a batch: each row calls its own copies."""

from __future__ import annotations

import re
import threading
from typing import Any

import torch
from transformers import MaxLengthCriteria, StoppingCriteriaList

from speccompile.errors import InvalidInput, InvalidOption
from speccompile.runtime.criteria import criteria_of_row
from support.errors import raises

IDS = torch.tensor([[5, 6, 7]])


class RowTracker:
    """The shape of lm-eval's ``MultiTokenEOSCriteria``: a memory for each row, and one answer for all of them."""

    def __init__(self, token: int, rows: int) -> None:
        self.token, self.done = token, [False] * rows
        self.module = torch.nn.Linear(1, 1)

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        for row in range(len(self.done)):
            self.done[row] |= int(ids[row, -1]) == self.token
        return all(self.done)


def test_a_row_ends_by_its_own_memory() -> None:
    given = RowTracker(7, 3)
    first, second, _ = (criteria_of_row(StoppingCriteriaList([given]), row, 3) for row in range(3))
    assert first(IDS, None).tolist() == [True]
    assert first(torch.tensor([[5, 6, 7, 8]]), None).tolist() == [True]
    assert second(torch.tensor([[5, 6, 7, 8]]), None).tolist() == [False]
    assert given.done == [False] * 3


def test_the_element_of_the_row_counts() -> None:
    criteria = StoppingCriteriaList([lambda ids, scores: torch.tensor([False, True, False])])
    ends = [criteria_of_row(criteria, row, 3)(IDS, None).tolist() for row in range(3)]
    assert ends == [[False], [True], [False]]
    with raises(
        InvalidInput, name="stopping_criteria", reason=re.compile(r"a bool or a tensor of shape \[2\], got shape \[3\]")
    ):
        criteria_of_row(criteria, 0, 2)(IDS, None)


def test_one_row_calls_the_given_objects_and_what_has_no_memory_is_shared() -> None:
    longest, own = MaxLengthCriteria(3), RowTracker(7, 1)
    criteria = StoppingCriteriaList([longest, own])
    assert criteria_of_row(criteria, 0, 1) is criteria
    shared, copied = criteria_of_row(criteria, 1, 2)
    assert shared is longest
    assert copied._criterion is not own and copied._criterion.module is own.module


def test_what_cannot_be_copied_is_refused() -> None:
    own = RowTracker(7, 2)
    own.lock = threading.Lock()  # type: ignore[attr-defined]
    with raises(InvalidOption, name="stopping_criteria", reason=re.compile("each row needs its own copy")):
        criteria_of_row(StoppingCriteriaList([own]), 0, 2)
