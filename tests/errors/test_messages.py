"""The English of all error messages stands in one file, ``messages.txt``: tests elsewhere assert classes and fields."""

from __future__ import annotations

import inspect
import os
import re
import string
import textwrap
from pathlib import Path

import pytest

from speccompile import errors
from speccompile.errors import InvalidOption, SpecCompileError, UnknownTier, UserError
from support.error_examples import EXAMPLES
from support.errors import raises

GOLDEN = Path(__file__).with_name("messages.txt")
#: Set to rewrite the file: SPECCOMPILE_WRITE_MESSAGES=1 python -m pytest tests/errors
WRITE = "SPECCOMPILE_WRITE_MESSAGES"
CLASSES = {
    name: found
    for name, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, SpecCompileError) and found.__module__ == errors.__name__ and found.__name__ == name
}


def fields_of(template: str) -> set[str]:
    return {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}


def entry(name: str) -> str:
    kind = CLASSES[name]
    example = textwrap.indent(str(kind(**EXAMPLES[name])), "    ")
    return f"{name} ({kind.__base__.__name__})\n  template\n    {kind.template}\n  example\n{example}\n"


def test_each_class_has_an_example_of_exactly_its_fields() -> None:
    wanted = {name: fields_of(kind.template) for name, kind in CLASSES.items()}
    assert {name: set(fields) for name, fields in EXAMPLES.items()} == wanted, "see tests/support/error_examples.py"


def test_messages_are_those_of_the_golden_file() -> None:
    messages = "\n".join(entry(name) for name in CLASSES)
    if os.environ.get(WRITE):
        GOLDEN.write_text(messages)
    assert messages == GOLDEN.read_text(), f"if the new messages are right: {WRITE}=1 python -m pytest tests/errors"


def test_templates_end_with_a_full_stop() -> None:
    ends = {name: list(string.Formatter().parse(kind.template))[-1] for name, kind in CLASSES.items()}
    # A field at the end brings its own.
    assert not [name for name, (text, field, _, _) in ends.items() if field is None and not text.endswith(".")]


def test_older_names_are_the_classes_of_now() -> None:
    assert errors.ConsumeUnavailable is errors.FreeOriginalsUnavailable
    assert errors.ModelConsumed is errors.OriginalsFreed


# --- the helper that asserts them ---------------------------------------------------------------------------------


def test_raises_wants_exactly_the_class_and_the_fields() -> None:
    with raises(UnknownTier, tier=5) as error:
        raise UnknownTier(tier=5, built="0, 3")
    assert error.value.fields["built"] == "0, 3"
    for kind, fields in (
        (UserError, {}),
        (UnknownTier, {"tier": 4}),
        (UnknownTier, {"tiers": 5}),
        (UnknownTier, {"tier": 5.0}),
    ):
        with pytest.raises(AssertionError), raises(kind, **fields):
            raise UnknownTier(tier=5, built="0, 3")
    with pytest.raises(pytest.fail.Exception), raises(UnknownTier):
        pass


def test_a_pattern_is_searched_in_the_text_of_a_field() -> None:
    with raises(InvalidOption, reason=re.compile("int >= 1")):
        raise InvalidOption(**EXAMPLES["InvalidOption"])
    with pytest.raises(AssertionError), raises(InvalidOption, reason=re.compile("int >= 2")):
        raise InvalidOption(**EXAMPLES["InvalidOption"])
