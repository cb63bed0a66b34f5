"""Public definitions have docstrings."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import speccompile

#: Share of the public classes, functions, methods and properties of the package's modules.
DOCUMENTED = 0.95


def modules() -> Iterator[ModuleType]:
    """All modules but those of extras that are not installed here."""
    for found in pkgutil.walk_packages(speccompile.__path__, "speccompile."):
        if not found.name.endswith("__main__"):
            try:
                yield importlib.import_module(found.name)
            except ImportError:
                assert found.name.startswith("speccompile.serve.replicas."), found.name


def definitions(module: ModuleType) -> Iterator[tuple[str, bool]]:
    """Each public definition of a module, and whether it has a docstring: a member's may be inherited, and that which
    ``dataclass`` writes is none."""
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value):
            yield f"{module.__name__}.{name}", bool(value.__doc__)
        elif inspect.isclass(value):
            yield f"{module.__name__}.{name}", bool(value.__doc__) and not value.__doc__.startswith(f"{name}(")
            for member, held in vars(value).items():
                function = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
                if not member.startswith("_") and inspect.isfunction(function):
                    documented = bool(inspect.getdoc(getattr(value, member)))
                    yield f"{module.__name__}.{name}.{member}", documented


def test_public_definitions_have_docstrings() -> None:
    found = [item for module in modules() for item in definitions(module)]
    missing = [name for name, documented in found if not documented]
    assert len(found) > 2500
    assert len(missing) <= (1 - DOCUMENTED) * len(found), missing
