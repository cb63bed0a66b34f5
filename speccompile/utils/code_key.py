"""A key for an object of a user's class. Keys are equal while its values and the code that it may run are equal."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
import sysconfig
from abc import ABC
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import FunctionType
from typing import Any, Generic

from speccompile.utils.loaded_code import attributes, code_key, functions, reached, slots
from speccompile.utils.stable_key import NoStableKey, stable_key

_PACKAGE = __name__.partition(".")[0]
_INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib"))


def own_code_key(value: Any) -> Any:
    """Return a key of ``value`` and its class, as JSON. It has:

    - the attributes of ``value`` and of its class;
    - digests of all files of the user that the class's module imports, directly or not, at any place;
    - the loaded code of the user that its methods reach, with the global numbers, strings and containers of these that
      the code reads;
    - versions of installed packages.

    It does not find modules with computed names (``importlib.import_module``).

    Raises:
        NoStableKey: an attribute has no stable form, a method is a closure, or the code is in no file (typed into a
            console).
    """
    own = [cls for cls in type(value).__mro__ if not (_is_ours(cls.__module__) or cls in (object, ABC, Generic))]
    # A class that type() created has the module of its metaclass.
    held = [cls.__module__ for cls in own] + [item.__module__ for cls in own for item in functions(cls)]
    files, packages = _imports([name for name in dict.fromkeys(held) if not _is_known(name)])
    digests = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    classes = [[cls.__qualname__, [[name, _attribute_key(item)] for name, item in attributes(cls)]] for cls in own]
    # A file may have been changed after it was loaded.
    loaded = reached([item for cls in own for item in functions(cls)], _is_users)
    return [classes, stable_key(_values(value)), digests, loaded, sorted(map(_version, packages))]


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == _PACKAGE


def _is_known(module: str) -> bool:
    """Whether ``module`` is of this package or of the standard library."""
    return _is_ours(module) or (module != "__main__" and module.partition(".")[0] in sys.stdlib_module_names)


def _is_users(module: str) -> bool:
    """Whether ``module`` is the user's: not of this package, the standard library or an installed package."""
    if _is_known(module):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not any(Path(file).resolve().is_relative_to(folder) for folder in _INSTALLED)


def _values(value: Any) -> dict[str, Any]:
    """Attributes of the object, from ``__dict__`` and slots."""
    names = [name for cls in type(value).__mro__ for name in slots(cls)]
    in_slots = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **in_slots}


def _attribute_key(item: Any) -> Any:
    if isinstance(item, staticmethod | classmethod):
        item = item.__func__
    if isinstance(item, property):
        return [None if part is None else _function_key(part) for part in (item.fget, item.fset)]
    return _function_key(item) if isinstance(item, FunctionType) else stable_key(item)


def _function_key(function: Any) -> Any:
    # The cell of super() refers to the class itself.
    if not isinstance(function, FunctionType) or set(function.__code__.co_freevars) - {"__class__"}:
        raise NoStableKey(function)
    return [code_key(function.__code__), stable_key(function.__defaults__), stable_key(function.__kwdefaults__)]


def _imports(modules: list[str]) -> tuple[set[Path], set[str]]:
    """Return the user's files that ``modules`` consist of and import from, and the installed packages they import."""
    files: set[Path] = set()
    packages: set[str] = set()
    waiting, seen = list(modules), set(modules)
    while waiting:
        name = waiting.pop()
        file = _file_of(name, required=name in modules)
        if file is None:
            continue
        if any(file.is_relative_to(folder) for folder in _INSTALLED):
            packages.add(name.partition(".")[0])
            continue
        files.add(file)
        found = {other for other in _imported(file, name) if not _is_known(other)} - seen
        seen |= found
        waiting += sorted(found)
    return files, packages


def _file_of(name: str, *, required: bool) -> Path | None:
    """Return the file of a module; None if the name is not a module, or has no source."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if module is None and not required:
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        file = found.origin if found is not None and found.has_location else None
    if file is None and required:
        raise NoStableKey(name)
    return None if file is None else Path(file).resolve()


def _imported(file: Path, name: str) -> Iterator[str]:
    """Yield names that ``file``, the module ``name``, imports at any place. They may be modules."""
    if file.suffix != ".py":
        return
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parent = ".".join(parts[: len(parts) - node.level + 1])
                base = f"{parent}.{base}" if base else parent
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())


def _version(package: str) -> str:
    return f"{package} {[version(name) for name in sorted(set(_distributions().get(package, [])))]}"
