"""How a message shows a value, and where a traceback says that its class is."""

from __future__ import annotations

import pickle

import torch
from torch import nn

from speccompile import errors
from speccompile.errors import EmptyPrompt, shown
from speccompile.errors.base import LONGEST_VALUE


def test_values_in_messages_are_short() -> None:
    assert shown({"head": [nn.Linear(2, 2)], "ids": torch.zeros(3)}) == (
        "{'head': [<Linear>], 'ids': <Tensor torch.float32 [3]>}"
    )
    assert shown(("ngram", 3, None)) == "('ngram', 3, None)"
    assert len(shown("x" * 10_000)) == LONGEST_VALUE + 3


def test_tracebacks_and_pickles_name_the_public_module() -> None:
    assert {getattr(errors, name).__module__ for name in errors.__all__} == {"speccompile.errors"}
    copy = pickle.loads(pickle.dumps(EmptyPrompt(row=3)))
    assert type(copy) is EmptyPrompt and copy.fields == {"row": 3}
