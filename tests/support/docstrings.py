"""What docstrings say of parameters."""

from __future__ import annotations

import inspect
import re
from typing import Any

from speccompile.utils.options import Options


def paragraphs(function: Any) -> dict[str, str]:
    """The paragraphs of a docstring's ``Args``, each in one line, by parameter; code is in single backticks."""
    text = inspect.getdoc(function) or ""
    section = text.split("Args:\n", 1)[1].split("\n\n", 1)[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(paragraph.split()).replace("``", "`") for name, paragraph in found}


def different_paragraphs(function: Any, options: type[Options]) -> list[str]:
    """The options whose paragraph in the docstring of ``function`` does not begin with their sentence."""
    said = paragraphs(function)
    return [name for name in options.names() if not said.get(name, "").startswith(options.sentence(name))]
