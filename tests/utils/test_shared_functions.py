"""Functions that the rows of a batch share: they may read what they hold, and an error says that they change it."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from speccompile.errors import InvalidInput, InvalidOption
from speccompile.utils.row_copies import own_copy
from support.errors import raises

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

IDS, SCORES = torch.tensor([[5, 6, 7]]), torch.zeros(1, 9)
BANNED, BIAS, LOG, PATTERN = [3, 4], torch.arange(9.0), logging.getLogger(__name__), re.compile("a")
seen: list[int] = []
counter = 0


def adds_bias(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + BIAS


def reads_globals(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    LOG.debug("%s", PATTERN.match("b"))
    return adds_bias(ids, scores.index_fill(1, torch.tensor(BANNED), 0.0))


def reads_a_closure() -> Function:
    banned, bias, table = [3, 4], torch.arange(9.0), {"a": [torch.ones(9)], (1, 2): {3}}
    module = torch.nn.Linear(9, 9)
    return lambda ids, scores: module(scores[:, : len(banned + [0] * 7)] + bias + table["a"][0])


def reads_a_default(ids: torch.Tensor, scores: torch.Tensor, banned: Any = (3, 4), *, bias: Any = BIAS) -> torch.Tensor:
    return scores.index_fill(1, torch.tensor(banned), 0.0) + bias


def stops_when_told() -> Function:
    """Another thread writes the flag, between calls."""
    flag = {"stop": False}
    return lambda ids, scores: scores * (not flag["stop"])


PURE = [adds_bias, reads_globals, reads_a_closure(), reads_a_default, stops_when_told(), lambda ids, scores: scores]
PURE += [functools.partial(reads_a_default, banned=[1, 2])]


@pytest.mark.parametrize("function", PURE)
def test_a_function_that_reads_what_it_holds_is_called_for_every_row(function: Function) -> None:
    expected = function(IDS, SCORES.clone())
    for row in range(3):
        assert torch.equal(own_copy("logits_processor", function, row)(IDS, SCORES.clone()), expected)


def keeps_a_list() -> Function:
    mine: list[int] = []
    return lambda ids, scores: (mine.append(1), scores)[1]


def keeps_a_bound_append() -> Function:
    remember = [0].append
    return lambda ids, scores: (remember(1), scores)[1]


def counts_in_its_closure() -> Function:
    calls = 0

    def count(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return scores

    return count


def adds_to_a_tensor() -> Function:
    total = torch.zeros(9)
    return lambda ids, scores: scores - total.add_(1)


def adds_to_a_tensor_in_a_list() -> Function:
    totals = [torch.zeros(9)]
    return lambda ids, scores: scores - totals[0].add_(1)


def adds_to_an_inference_tensor() -> Function:
    with torch.inference_mode():
        total = torch.zeros(9)
    return lambda ids, scores: scores - total.add_(1)


def keeps_a_default(ids: torch.Tensor, scores: torch.Tensor, mine: Any = {}) -> torch.Tensor:  # noqa: B006
    mine[len(mine)] = 1
    return scores


def keeps_an_attribute(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    keeps_an_attribute.calls += 1  # type: ignore[attr-defined]
    return scores


keeps_an_attribute.calls = 0  # type: ignore[attr-defined]


def appends_to_a_global(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    seen.append(1)
    return scores


def rebinds_a_global(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    global counter
    counter += 1
    return scores


def calls_one_that_remembers(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return next(appends_to_a_global(ids, scores) for _ in range(1))


class Holds(LogitsProcessor):
    """An object is copied; the function that it holds is not."""

    def __init__(self, function: Function) -> None:
        self.helpers = {"function": function}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.helpers["function"](input_ids, scores)


REMEMBERS = {
    "mine": [keeps_a_list(), keeps_a_default, Holds(keeps_a_list()), functools.partial(keeps_a_list())],
    "remember": [keeps_a_bound_append()],
    "calls": [counts_in_its_closure(), keeps_an_attribute],
    "total": [adds_to_a_tensor(), adds_to_an_inference_tensor()],
    "totals": [adds_to_a_tensor_in_a_list()],
    "seen": [appends_to_a_global, calls_one_that_remembers],
    "counter": [rebinds_a_global],
}


@pytest.mark.parametrize(
    ("name", "function"), [(name, function) for name, functions in REMEMBERS.items() for function in functions]
)
def test_a_call_that_changes_what_the_function_holds_is_an_error(name: str, function: Function) -> None:
    own = own_copy("logits_processor", function, 1)
    reason = re.compile(rf"a call changed '{name}' of the function .*give an object of a class derived from Logits")
    with torch.inference_mode(), raises(InvalidInput, name="logits_processor", reason=reason):
        own(IDS, SCORES.clone())


def test_what_cannot_be_compared_is_refused_at_once() -> None:
    event = threading.Event()
    reason = re.compile("'event' of the function .*, of type Event, would be shared .* one row at a time")
    with raises(InvalidOption, name="stopping_criteria", reason=reason):
        own_copy("stopping_criteria", lambda ids, scores: event.is_set(), 0)


class Helper:
    def __init__(self) -> None:
        self.modules = [torch.nn.Linear(2, 2)]
        self.calls: list[int] = []


class Nested(torch.nn.Module):
    """Modules are shared wherever they are; what remembers is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.helper, self.layer, self.calls = Helper(), torch.nn.Linear(2, 2), [0]

    def process(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        return scores


def test_modules_are_shared_wherever_a_copy_holds_them() -> None:
    given = Nested()
    own = own_copy("logits_processor", given, 0)
    assert own is not given and own.layer is given.layer  # type: ignore[attr-defined]
    assert own.helper is not given.helper and own.helper.calls is not given.helper.calls  # type: ignore[attr-defined]
    assert own.helper.modules[0] is given.helper.modules[0]  # type: ignore[attr-defined]


def test_a_bound_method_has_its_own_object() -> None:
    given = Nested()
    own_copy("logits_processor", given.process, 0)(IDS, SCORES)
    assert given.calls == [0]
