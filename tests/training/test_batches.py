"""Batches of texts and of their saved hidden states."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from speccompile.errors import InvalidInput
from speccompile.hidden_states import Record
from speccompile.training.batches import Batches
from speccompile.training.examples import Example, Examples
from support.errors import raises


def record(name: str, ids: list[int]) -> Record:
    size = len(ids)
    return Record(
        id=name,
        input_ids=torch.tensor(ids),
        loss_mask=torch.ones(size, dtype=torch.bool),
        hidden_state=torch.zeros(size, 4),
        aux_hidden_state=torch.zeros(size, 3, 4),
        layers=(0, 1, 2),
    )


@pytest.mark.parametrize("ids", [[1, 2, 4], [1, 2]])
def test_states_of_another_text_are_refused(examples: Examples, ids: list[int]) -> None:
    own = replace(examples, states={"0": record("0", [1, 2, 3, 9])})  # type: ignore[arg-type]
    # More than the text has is left out.
    assert Batches(own, 16, 0)[0]["tapped"].shape[:2] == (1, 3)
    with raises(InvalidInput, reason=re.compile("'0' belong to another text")):
        Batches(replace(examples, states={"0": record("0", ids)}), 16, 0)[0]  # type: ignore[arg-type]


@pytest.fixture
def examples() -> Examples:
    text = Example("0", torch.tensor([1, 2, 3], dtype=torch.int32), torch.ones(3, dtype=torch.bool))
    return Examples((text,), ("target",))
