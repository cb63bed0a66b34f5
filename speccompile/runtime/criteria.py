"""A call's stopping criteria for one row of several, which is decoded by itself and at its own times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from speccompile.errors import InvalidInput, InvalidOption
from speccompile.runtime.inputs import read_count
from speccompile.sampling.request import Sampling
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


Criterion = TypeVar("Criterion")


@dataclass(frozen=True)
class Ends:
    """Where the rows of a call end besides its stopping criteria.

    Args:
        new_tokens: most new tokens of a row.
        eos: ids that end it.
    """

    new_tokens: int
    eos: tuple[int, ...]


def first_of(kind: type[Criterion], criteria: Sequence[Any]) -> Criterion | None:
    """The first of exactly this type: in transformers it replaces the one that ``generate`` builds."""
    return next((criterion for criterion in criteria if type(criterion) is kind), None)


def replace_built_in_ends(criteria: Sequence[Any], ends: Ends, sampling: Sampling | None, width: int) -> Ends:
    """``ends``, where a ``MaxLengthCriteria`` or an ``EosTokenCriteria`` of the caller's replaces them: transformers'
    ``_merge_criteria_processor_list``.

    Logits processors that depend on an end keep the built-in one in transformers, and would follow the criterion here.

    Args:
        width: P of the prompts as given, with padding.

    Raises:
        InvalidOption: a logits processor depends on an end that is replaced by another.
    """
    values = {} if sampling is None else sampling.values
    if longest := first_of(MaxLengthCriteria, criteria):
        new_tokens = read_count("generate", "MaxLengthCriteria.max_length", max(1, longest.max_length - width))
        _refuse(values, ("forced_eos_token_id",), longest, new_tokens != ends.new_tokens)
        ends = replace(ends, new_tokens=new_tokens)
    if (last := first_of(EosTokenCriteria, criteria)) and set(last.eos_token_id.flatten().tolist()) != set(ends.eos):
        _refuse(values, ("min_length", "min_new_tokens", "guide"), last, bool(ends.eos))
        # The criterion itself is asked after each token.
        ends = replace(ends, eos=())
    return ends


def _refuse(values: Any, names: Sequence[str], criterion: Any, differs: bool) -> None:
    for name in names:
        if differs and name in values:
            reason = f"stopping_criteria has a {type(criterion).__name__}, which moves the end that it depends on"
            reason += "; give one of them"
            raise InvalidOption(where="generate", name=name, value=values[name], reason=reason)
