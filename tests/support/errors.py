"""Errors asserted by class and fields, not by their English."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from speccompile.errors import SpecCompileError


@contextlib.contextmanager
def raises(kind: type[SpecCompileError], **fields: Any) -> Iterator[pytest.ExceptionInfo[SpecCompileError]]:
    """Expect an error of exactly the class ``kind`` with these ``fields``, among others.

    A field has to equal the given value and be of its type. A compiled pattern is searched in the field's text: for
    fields that hold a sentence, such as ``reason``.
    """
    with pytest.raises(kind) as info:
        yield info
    assert_error(info.value, kind, **fields)


def assert_error(error: BaseException | None, kind: type[BaseException], **fields: Any) -> None:
    """As :func:`raises` has it, of an error that is at hand. An error of others has no ``fields``."""
    assert type(error) is kind, f"expected {kind.__name__}, got {type(error).__name__}: {error}"
    for name, wanted in fields.items():
        assert isinstance(error, SpecCompileError)
        assert name in error.fields, f"{kind.__name__} has the fields {sorted(error.fields)}, not {name!r}"
        found = error.fields[name]
        if isinstance(wanted, re.Pattern):
            assert wanted.search(str(found)), f"{name}={found!r} does not hold {wanted.pattern!r}"
        else:
            assert type(found) is type(wanted) and found == wanted, f"{name}={found!r}, expected {wanted!r}"
