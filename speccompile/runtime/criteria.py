"""The stopping criteria of a call for one of several rows. Each row is decoded separately and at its own pace."""

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

#: Criteria that decide for each line of the ids separately, and have no state.
_OF_ANY_ROW = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)


class _OfRow:
    """A criterion that may have state for each row of the batch, like lm-eval's stop sequences. It receives the tokens
    of this row in every line, so its result at this row's index is right."""

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
    """Return ``criteria`` of a call with ``rows`` rows for this row, which calls them with ids ``[1, L]``. With one row
    they are the given objects.

    Raises:
        InvalidOption: a criterion cannot be copied.
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
    """The ends of a call's rows, except its stopping criteria.

    Args:
        new_tokens: most new tokens of a row.
        eos: ids that end a row.
    """

    new_tokens: int
    eos: tuple[int, ...]


def first_of(kind: type[Criterion], criteria: Sequence[Any]) -> Criterion | None:
    """Return the first criterion of exactly this type. In transformers it replaces the one that ``generate`` builds."""
    return next((criterion for criterion in criteria if type(criterion) is kind), None)


def replace_built_in_ends(criteria: Sequence[Any], ends: Ends, sampling: Sampling | None, width: int) -> Ends:
    """Return ``ends``, replaced by a ``MaxLengthCriteria`` or an ``EosTokenCriteria`` of the caller, as in
    transformers' ``_merge_criteria_processor_list``.

    Logits processors that depend on an end keep the built-in end in transformers, and would use the criterion here.

    Args:
        width: P of the prompts as given, with padding.

    Raises:
        InvalidOption: a logits processor depends on an end that the criterion changes.
    """
    values = {} if sampling is None else sampling.values
    if longest := first_of(MaxLengthCriteria, criteria):
        new_tokens = read_count("generate", "MaxLengthCriteria.max_length", max(1, longest.max_length - width))
        _refuse(values, ("forced_eos_token_id",), longest, new_tokens != ends.new_tokens)
        ends = replace(ends, new_tokens=new_tokens)
    if (last := first_of(EosTokenCriteria, criteria)) and set(last.eos_token_id.flatten().tolist()) != set(ends.eos):
        _refuse(values, ("min_length", "min_new_tokens", "guide"), last, bool(ends.eos))
        # The criterion itself is called after each token.
        ends = replace(ends, eos=())
    return ends


def _refuse(values: Any, names: Sequence[str], criterion: Any, differs: bool) -> None:
    for name in names:
        if differs and name in values:
            reason = f"stopping_criteria has a {type(criterion).__name__}, which moves the end that it depends on"
            reason += "; give one of them"
            raise InvalidOption(where="generate", name=name, value=values[name], reason=reason)
