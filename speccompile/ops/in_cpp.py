"""Which library holds the C++ form of an op (:mod:`speccompile.ops.cpu.library`)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from speccompile.ops.cpu.library import BASE
from speccompile.utils.torch_private import OpOverload

_libraries: dict[str, str] = {}


def in_cpp(name: str, library: str = BASE) -> None:
    """``speccompile::name`` runs on a CPU after ``load_cpu_ops(library)``. Of a ``native_`` form in ``base`` that need
    not be said."""
    _libraries[name] = library


def library_of(op: OpOverload) -> str | None:
    """The library that ``op`` is in, None if it is not in C++ of ours."""
    namespace, _, name = op._schema.name.partition("::")
    if namespace != "speccompile":
        return None
    return _libraries.get(name, BASE if name.startswith("native_") else None)


def libraries_of(graphs: Iterable[fx.Graph]) -> tuple[str, ...]:
    """All that ops of ``graphs`` are in, sorted."""
    targets = {node.target for graph in graphs for node in graph.nodes}
    found = {library_of(target) for target in targets if isinstance(target, OpOverload)}
    return tuple(sorted(library for library in found if library is not None))
