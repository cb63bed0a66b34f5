"""Counts words that the documentation avoids: the list of the project's style, as regular expressions.

``python tests/support/plain_words.py [-v] FILE...`` prints how often each occurs, and with ``-v`` where.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

#: What to avoid, and what to write.
AVOIDED = {
    r"behind": "after",
    r"in front of": "before",
    r"tells?|told": "reports, returns, raises, receives",
    r"says?|said": "reports, states",
    r"nobody|whoever|somebody|everybody|anybody": "the caller, the request, the thread",
    r"(?<!there\s)(?:is|are|was|were) no(?! (?:longer|more|wider|faster|slower))": "is not, must be",
    r"has no room": "is full",
    r"(?:is|are|was|were) asked(?: for)?|asks? for|what there is": "requested, available",
    r"of (?:its|their|your|our|one's) own": "its own, separate",
    r"as far as": "two sentences",
    r"so that": "two sentences",
    r"makes?(?!-texts)|made|making": "builds, creates, compiles, computes",
    r"(?:takes?|took)(?! (?:\d|a |about|as long|precedence))": "accepts, needs, copies",
    r"(?:goes|go) with": "is compatible with, combines",
    r"(?:goes|go) on|went on": "continues",
    r"brings?|brought": "loads, copies",
    r"besides": "also, as well",
    r"wants|wanted": "requests, requires",
    r"thought|thinks?": "is assumed to be",
    r"looks? at": "reads, checks",
}
_PATTERN = {name: re.compile(rf"\b(?:{name})\b".replace(" ", r"\s+"), re.IGNORECASE) for name in AVOIDED}


def prose(text: str) -> str:
    """``text`` with blanks in the place of code, link targets, and generated tables; lines stay where they are."""
    hidden = (
        r"^```.*?^```",  # blocks of code
        r"^(?: {4}\S[^\n]*\n)+",  # indented ones
        r"<!-- [\w-]+(?: \w+)* -->\n\|.*?<!-- end of [\w ]+ -->",
        r"`[^`\n]+`",
        r"\]\([^)]*\)",
    )
    for pattern in hidden:
        text = re.sub(pattern, lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.MULTILINE | re.DOTALL)
    return text


def found(file: Path) -> Iterator[tuple[str, int, str]]:
    """Each avoided expression of a file: its pattern, its line, and the line's text."""
    text = prose(file.read_text())
    lines = text.splitlines()
    for name, pattern in _PATTERN.items():
        for match in pattern.finditer(text):
            number = text.count("\n", 0, match.start()) + 1
            yield name, number, lines[number - 1].strip()


if __name__ == "__main__":
    verbose = "-v" in sys.argv
    counts: Counter[str] = Counter()
    for path in sys.argv[1 + verbose :]:
        for name, number, line in found(Path(path)):
            counts[name] += 1
            if verbose:
                print(f"{path}:{number}: {name}: {line}")
    for name in AVOIDED:
        print(f"{counts[name]:5}  {name}  ->  {AVOIDED[name]}")
    print(f"{counts.total():5}  in all")
