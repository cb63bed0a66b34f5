"""docs/server.md names every field and every option."""

from __future__ import annotations

import re
from pathlib import Path

from speccompile.serve.fields import ChatBody, CompletionBody
from speccompile.serve.ignored import IGNORED
from speccompile.serve.options import ServeOptions
from speccompile.serve.refused import REFUSED
from speccompile.serve.responses_fields import ResponsesBody

PAGE = Path(__file__).parents[2] / "docs" / "server.md"


def test_the_page_names_all_fields_and_options() -> None:
    text = PAGE.read_text()
    named = set(re.findall(r"`([a-z_]+)`", text))
    followed = {*ChatBody.model_fields, *CompletionBody.model_fields, *ResponsesBody.model_fields}
    assert {*followed, *REFUSED, *IGNORED} <= named
    options = {f"--{name.replace('_', '-')}" for name in ServeOptions.names()}
    assert options <= set(re.findall(r"`(--[a-z-]+)`", text))


def test_the_page_lists_what_is_refused() -> None:
    text = PAGE.read_text()
    start = text.index("Refused with the reason")
    assert set(re.findall(r"`([a-z_]+)`", text[start : text.index("\n\n", start)])) == REFUSED.keys()


def test_links_lead_to_headings() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE.read_text()):
        path, _, anchor = target.partition("#")
        headings = re.findall(r"^#+ (.*)$", (PAGE.parent / path).read_text(), re.MULTILINE)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}, target
