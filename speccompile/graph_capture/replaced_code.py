"""Functions of a model's files that other code has replaced, as packages with faster kernels do."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn


def replaced_code(model: nn.Module) -> str | None:
    """Return the name of a function or method that the files of the model's modules define, and that other code has
    replaced, or None. torch's own modules are not searched."""
    torchs = Path(torch.__file__).parent
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        file = getattr(module, "__file__", None)
        if file is None:
            return module.__name__
        if torchs in Path(file).parents:
            continue
        for name, found in _defined(module, file):
            if _code_of(found) is None or _code_of(found).co_filename != file:  # type: ignore[union-attr]
                return f"{module.__name__}.{name}"
    return None


def _defined(module: ModuleType, file: str) -> Iterator[tuple[str, Any]]:
    """The names of functions and methods in a module's file, and what has these names now."""
    for name in _names(file):
        kind, _, method = name.partition(".")
        found = vars(module).get(kind)
        yield name, vars(found).get(method) if method and inspect.isclass(found) else found


@functools.cache
def _names(file: str) -> tuple[str, ...]:
    found = []
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.append(node.name)
        elif isinstance(node, ast.ClassDef):
            found += [f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)]
    return tuple(found)


def _code_of(found: Any) -> CodeType | None:
    """The code under decorators that keep what they wrap."""
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, staticmethod | classmethod):
        found = found.__func__
    code = getattr(inspect.unwrap(found), "__code__", None) if callable(found) else None
    return code if isinstance(code, CodeType) else None
