"""Counts words that the prose of the code avoids: that of docstrings, comments and messages.

``python tests/support/code_prose.py [-v] FOLDER...`` prints how often each occurs, and with ``-v`` where.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.plain_words import AVOIDED

#: What to avoid in code beside :data:`support.plain_words.AVOIDED`, and what to write.
IN_CODE = {
    r"(?:has|have|had) to": "must",
    r"of (?:ours|theirs|yours)": "our, the package's",
    r"(?<!let )(?<!leave )(?<!stand )(?<!stands )alone": "only",
    r"rooms?": "package",
    r"departures?": "cancellation",
    r"host answers?": "host call",
    r"pupils?": "trainable head",
    r"twins?": "counterpart",
    r"stand-?ins?": "substitute, fake",
    r"(?:is|are) none": "is not, must be",
}
#: What to write for each that :func:`found` names.
REMEDIES = {**AVOIDED, **IN_CODE, "opening": "an imperative or a noun phrase"}
#: Words that no definition, parameter or variable of the package has in its name.
IN_NAMES = re.compile(
    r"(?:^|_)(?:told|tells?|says?|asked|brings?|brought|nobody|whoever|rooms?|departures?|pupils?|twins?|ears?|seldom|behind|besides"
    r"|consume[ds]?)(?:_|$)",
    re.IGNORECASE,
)
#: Public names of before.
OLDER_NAMES = {"consume", "ConsumeUnavailable", "ModelConsumed", "room"}
#: Their strings are texts for models.
OF_DATA = ("cli/prompts.py",)
#: How the first line of a docstring does not begin.
OPENING = re.compile(r"\s*(What|Of|How|Which|As|The same|And|That|Whose|Where|Who)\b")

_PATTERN = {
    name: re.compile(
        rf"\b(?:{name})\b".replace(" ", r"\s+") if "(?<" not in name else rf"\b(?:{name})\b", re.IGNORECASE
    )
    for name in {**AVOIDED, **IN_CODE}
}
#: Most texts have none, and one pattern finds that in a fraction of the time of all.
_ANY = re.compile("|".join(f"(?:{pattern.pattern})" for pattern in _PATTERN.values()), re.IGNORECASE)
#: Fields of templates are names, too.
_CODE = re.compile(r"``[^`]+``|`[^`]+`|\{\w+\}|:\w+:`[^`]+`|^\s*>>> .*$", re.MULTILINE)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
            continue
        match node.body[0]:
            case ast.Expr(value=ast.Constant(value=str()) as docstring):
                yield docstring


def _messages(tree: ast.Module) -> Iterator[ast.Constant]:
    """Strings of at least three words that are not docstrings, and of two within ``raise``."""
    docstrings = {id(node) for node in _docstrings(tree)}
    raised = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Raise) for part in ast.walk(node)}
    for node in ast.walk(tree):
        is_string = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if is_string and node.value.count(" ") >= (1 if id(node) in raised else 2):
            yield node


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments, those of neighbouring lines joined, by the line of the first."""
    start, lines, last = 0, [], -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#:? ?(noqa|type:|!)", token.string):
            continue
        if token.start[0] != last + 1 and lines:
            yield start, "\n".join(lines)
            lines = []
        if not lines:
            start = token.start[0]
        lines.append(token.string.lstrip("#: "))
        last = token.start[0]
    if lines:
        yield start, "\n".join(lines)


def found(file: Path) -> Iterator[tuple[str, int, str]]:
    """Each avoided expression of a file of Python: its pattern, its line, and the text around it."""
    source = file.read_text()
    tree, lines = ast.parse(source), source.splitlines()
    docstrings = [(node.lineno, str(node.value)) for node in _docstrings(tree)]
    for line, text in docstrings:
        if OPENING.match(text):
            yield "opening", line, text.splitlines()[0].strip()
    for number, text in enumerate(lines, start=1):
        # Sphinx prints such a comment as the docstring of the name after it.
        comment = re.match(r"\s*#: ", text)
        if comment and not re.match(r"\s*#:", lines[number - 2]) and OPENING.match(text[comment.end() :]):
            yield "opening", number, text.strip()
    messages = [(node.lineno, str(node.value)) for node in _messages(tree) if not file.as_posix().endswith(OF_DATA)]
    for line, text in (*docstrings, *messages, *_comments(source)):
        prose = _CODE.sub(lambda code: re.sub(r"[^\n]", "`", code[0]), text)
        for name, pattern in _PATTERN.items() if _ANY.search(prose) else ():
            for match in pattern.finditer(prose):
                around = " ".join(text[max(0, match.start() - 40) : match.end() + 40].split())
                yield name, line + prose.count("\n", 0, match.start()), around


def names(file: Path) -> Iterator[tuple[str, int]]:
    """Each name that a file of Python defines with an avoided word in it, and its line."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                name = node.name
            case ast.arg():
                name = node.arg
            case ast.Name(ctx=ast.Store()):
                name = node.id
            case _:
                continue
        if name not in OLDER_NAMES and IN_NAMES.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)):
            yield name, node.lineno


if __name__ == "__main__":
    verbose = "-v" in sys.argv
    counts: Counter[str] = Counter()
    for folder in map(Path, sys.argv[1 + verbose :]):
        for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
            for name, number, text in found(path):
                counts[name] += 1
                if verbose:
                    print(f"{path}:{number}: [{name}] {text}")
    for name, count in counts.most_common():
        print(f"{count:5}  {name}  ->  {REMEDIES[name]}")
    print(f"{counts.total():5}  in all")
