"""A call's stopping criteria for one row of several, which is decoded by itself and at its own times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from speccompile.errors import InvalidInput
from speccompile.utils.row_copies import own_copy

#: These answer for each line of the ids by itself and remember no row.
_OF_ANY_ROW = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)


class _OfRow:
    """A criterion that may keep a memory for each row of the batch, as lm-eval's stop sequences do: it is shown the
    tokens of this row in every line, so that what it finds at this row's index is right."""

    def __init__(self, criterion: Callable[..., Any], row: int, rows: int) -> None:
        self._criterion, self._row, self._rows = criterion, row, rows

    def __call__(self, ids: torch.Tensor, scores: None, **_: Any) -> torch.Tensor:
        answer = torch.as_tensor(self._criterion(ids.expand(self._rows, -1), scores))
        if answer.numel() == 1:
            return answer.reshape(1)
        if answer.shape == (self._rows,):
            return answer[self._row, None]
        name = getattr(self._criterion, "__name__", type(self._criterion).__name__)
        reason = f"{name} must return a bool or a tensor of shape [{self._rows}], got shape {list(answer.shape)}"
        raise InvalidInput(name="stopping_criteria", reason=reason)


def criteria_of_row(criteria: StoppingCriteriaList, row: int, rows: int) -> StoppingCriteriaList:
    """``criteria`` of a call with ``rows`` rows as this one calls them, with ids ``[1, L]``. With one row they are the
    given objects.

    Raises:
        InvalidOption: one cannot be copied.
    """
    if rows == 1:
        return criteria
    return StoppingCriteriaList(
        criterion
        if type(criterion) in _OF_ANY_ROW
        else _OfRow(own_copy("stopping_criteria", criterion, row), row, rows)
        for criterion in criteria
    )
