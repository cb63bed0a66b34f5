"""Prompts for measurements: built-in ones, lines of text files, and those of files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from speccompile.bench.prompt_files import read_prompt_file


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt. ``chat`` is False for text to continue without a template; None leaves the choice to the tokenizer."""

    name: str
    category: str
    text: str
    chat: bool | None = None


def read_prompts(path: Path) -> list[NamedPrompt]:
    """Read the prompts of a file: of conversations the first turn. The layouts are those of
    :mod:`speccompile.bench.prompt_files`.

    Raises:
        InvalidInput: the file is not valid. The error names the file and the line.
    """
    return [NamedPrompt(each.name, each.category, each.turns[0], each.chat) for each in read_prompt_file(path)]


_STORY = (
    "The old lighthouse keeper climbed the stairs every evening at dusk. He lit the lamp, checked the wind, and wrote "
    "the weather into the book. No ship was lost on that coast in forty years."
)

_JOURNEY = (
    "Anna left Lisbon in March and took the night train to Madrid. In April she found work in Marseille, where her "
    "brother Paul owns a bakery. They plan to visit Vienna together in the summer."
)

_MUSEUM = (
    "The museum opens at nine in the mornning. Visitors can leave there coats at the entrance. The guided tour starts "
    "at ten and takes about one hour. The museum closes at six in the evening."
)

_CORRECT = "Fix the spelling mistakes in this text and write out the whole corrected text"

BUILT_IN = (
    NamedPrompt("repeat", "quoting", f"Repeat this text word for word:\n\n{_STORY}"),
    NamedPrompt("extract", "quoting", f"Extract all names and places from this text:\n\n{_JOURNEY}"),
    NamedPrompt("correct", "quoting", f"{_CORRECT}:\n\n{_MUSEUM}"),
    NamedPrompt(
        "write", "other", "Write the opening of a story about a clockmaker who finds a letter in an old watch."
    ),
    NamedPrompt("explain", "other", "Why does the moon have phases, and how long does one cycle take?"),
    NamedPrompt(
        "code", "other", "Write a Python function that returns the prime numbers below n, and explain how it works."
    ),
    NamedPrompt("compare", "other", "What is the difference between weather and climate?"),
    NamedPrompt("email", "other", "Write an email to a colleague that moves our meeting from Monday to Tuesday."),
    NamedPrompt("advise", "other", "Give three tips to someone who has just begun to run."),
)
