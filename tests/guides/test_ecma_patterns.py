"""Patterns of schemas, which are ECMA-262's, as Rust's regex reads them."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from speccompile.errors import InvalidGuide
from speccompile.guides import json_schema_guide, regex_guide
from speccompile.guides.ecma import rust_pattern
from support.errors import raises
from support.guide_tokenizers import byte_level, spelled


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^[[a]b]$", ["[b]", "ab]"], ["a", "b"]),
        (r"^[[:alpha:]]+$", [":]", "a]]"], ["Wo", "[a]"]),
        (r"^[a-z&&[a-c]]$", ["&]", "z]"], ["a"]),
        (r"^[a&&b]$", ["a", "&", "b"], ["c"]),
        (r"^[a~~b]$", ["a", "~", "b"], ["c"]),
        (r"^[+--]$", ["+", ",", "-"], ["."]),
        (r"^[a-f0-9[]{2}$", ["a[", "09"], ["g0"]),
        (r"^[\]\-a]$", ["]", "-", "a"], ["\\"]),
        (r"^[^[\]]$", ["a"], ["[", "]"]),
        (r"^\d{2}$", ["12"], ["\u0663\u0663", "1a"]),
        (r"^\w$", ["a", "_", "0"], ["é", "-"]),
        (r"^[^\W\d]$", ["a", "_"], ["1", "é", "-"]),
        (r"^.$", ["a", "é"], ["", "ab", "\n", "\r", "\u2028"]),
        (r"^\u0041\/$", ["A/"], ["a/"]),
        ("b", ["b", "abc"], ["ac"]),
        (r"^\s$", [" ", "\t", "\u00a0", "\ufeff"], ["\x85", "a"]),
        (r"^[\S]$", ["\x85", "a"], [" ", "\ufeff"]),
        (r"^\f$", ["\f"], ["f"]),
        (r"^[(?i)]$", ["(", "?", "i"], ["I"]),
    ],
)
def test_patterns_mean_what_schemas_mean(pattern: str, right: list[str], wrong: list[str]) -> None:
    guide = json_schema_guide({"type": "string", "pattern": pattern}, byte_level())
    for text in right + wrong:
        assert guide.matches(spelled(json.dumps(text, ensure_ascii=False))) == (text in right), text


@pytest.mark.parametrize("pattern", [r"\x{3}", r"\pL", "(?i)ok", "(?x) o", "[a", r"\cA", r"\Q", "(?P<a>b)"])
def test_what_ecma_does_not_have_is_refused(pattern: str) -> None:
    with raises(InvalidGuide, what=pattern):
        rust_pattern(pattern)
    guide = json_schema_guide({"type": "string", "pattern": pattern}, byte_level(), strict=False)
    (left_out,) = guide.loosened
    assert left_out.startswith("pattern: ") and guide.matches(spelled('"anything"'))


@pytest.mark.filterwarnings("ignore:Possible")
@given(st.text(alphabet="ab[]^-&~(", max_size=6), st.text(alphabet="ab[]^-&~(", min_size=1, max_size=1))
def test_a_class_has_the_characters_that_python_reads(body: str, text: str) -> None:
    """Python's classes are ECMA's, but for a bracket at the beginning."""
    assume(not body.removeprefix("^").startswith("]") and body not in ("", "^"))
    pattern = f"[{body}]"
    try:
        expected = re.fullmatch(pattern, text, re.ASCII) is not None
    except re.error:
        return
    try:
        guide = regex_guide(rust_pattern(pattern), byte_level())
    except InvalidGuide:
        # Nothing matches it, or it is a range in the wrong order that Python does not see.
        assert not expected
        return
    assert guide.matches(spelled(text)) == expected
