"""One file knows torch's private modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from speccompile.utils import torch_private

ROOT = Path(__file__).parents[2] / "speccompile"
ADAPTER = ROOT / "utils" / "torch_private.py"
#: A name with a part that begins with one underscore; ``torch.__version__`` is public.
PRIVATE = re.compile(r"\btorch(?:\.\w+)*\._(?!_)\w+")


def private_names(source: str) -> Iterator[str]:
    """Private modules of torch and their members: imported, as attributes of ``torch``, or named in a string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        else:
            continue
        yield from (match[0] for name in names for match in PRIVATE.finditer(name))


def test_only_the_adapter_names_private_modules_of_torch() -> None:
    wrong = {
        str(path.relative_to(ROOT)): names
        for path in ROOT.rglob("*.py")
        if path != ADAPTER and (names := sorted(set(private_names(path.read_text()))))
    }
    assert not wrong


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch import _dynamo",
        "from torch._dynamo import config",
        "from torch.utils import _pytree as pytree",
        "torch.utils._pytree.tree_map",
        "torch._C._nn._parse_to('cpu')",
        "importlib.import_module('torch._inductor.codecache')",
        "logging.getLogger('torch._dynamo')",
    ],
)
def test_every_form_is_seen(line: str) -> None:
    assert list(private_names(f"def late():\n    {line}\n"))


def test_public_names_are_free() -> None:
    assert not list(private_names("import torch.utils.data\ntorch.__version__\nself._torch\n'torch.compile'"))


def test_the_adapter_offers_what_is_used_and_no_more() -> None:
    # Parenthesised lists span lines, and a program that another process runs is a string.
    imports = re.compile(rf"from {re.escape(torch_private.__name__)} import (?:\(([^)]*)\)|(.*))")
    used = set()
    for path in ROOT.rglob("*.py"):
        for several, one in imports.findall(path.read_text()):
            used |= set(re.findall(r"\w+", several or one))
    assert used == set(torch_private.__all__)
