"""Wraps of tiny models that are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import speccompile
from speccompile import Speculator
from speccompile.errors import SpecCompileError

VOCAB = 128


def wrap(model: Any, mode: str | None = "ngram", **arguments: Any) -> Speculator:
    return speccompile.wrap(
        model, mode, **({"tiers": (0, 3), "max_batch": 2, "max_len": 64, "backend": "eager"} | arguments)
    )


def label(value: Any) -> str | None:
    """Names a case after its error and arguments."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, dict):
        return " ".join(f"{name}={list(x.shape) if isinstance(x, torch.Tensor) else x!r}" for name, x in value.items())
    return ""


@contextlib.contextmanager
def refused(kind: type[SpecCompileError], *says: str) -> Iterator[None]:
    """Expects an error of exactly that class. Each of ``says`` is a part of one of its fields: of the text of ``name``,
    of ``name=value``, or, of an option, of this with the option's name."""
    with pytest.raises(kind) as info:
        yield
    assert type(info.value) is kind
    fields = info.value.fields
    texts = [*map(str, fields.values()), *(f"{name}={value!r}" for name, value in fields.items())]
    if "value" in fields:
        texts.append(f"{fields['name']}={fields['value']!r}")
    for text in says:
        assert any(text in found for found in texts), f"{text!r} is not in {texts}"
