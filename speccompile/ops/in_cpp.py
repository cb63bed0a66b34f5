"""Registry of the ops that have a C++ kernel on a CPU, and of the library that each kernel is in.

A library registers its kernels under the dispatch key ``CPU`` when it is loaded (:mod:`speccompile.ops.cpu.library`).
Until then, and where no library can be built, the dispatcher runs the reference of an op, which is registered under
``CompositeExplicitAutograd``. Both return the same values; only what ``greatest_share``,
``top_p_threshold``, ``min_p_threshold`` and ``likeliest`` compute by exponentials and logarithms may differ in its last
bits. An op of the model whose C++ kernel rounds in another way than the
reference has a second name, ``native_NAME``: a pass decides which of them runs when a step is built. The decision does
not depend on the libraries that another wrap of the process has loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from speccompile.utils.torch_private import OpOverload, is_explicit_composite

_libraries: dict[str, str] = {}
#: Names of the ops that bodies call: their libraries also have a C function of each (:mod:`speccompile.ops.cpu.shims`).
IN_BODIES: list[str] = []
#: Names of the ops whose kernels a recorded step repeats (:mod:`speccompile.lowering.recorded_step`).
RECORDED: set[str] = set()


def in_cpp(name: str, library: str) -> None:
    """Declare that ``library`` has a kernel of ``speccompile::name``, which can be called after
    ``load_cpu_ops(library)``."""
    _libraries[name] = library


def library_of(op: OpOverload) -> str | None:
    """The library with the C++ kernel of ``op``; None without a C++ kernel."""
    return _libraries.get(_own_name(op))


def is_recorded(op: OpOverload) -> bool:
    """Whether a recorded step can repeat the C++ kernel of ``op`` without the op."""
    return _own_name(op) in RECORDED


def _own_name(op: OpOverload) -> str:
    """The name of an op of this package; an empty string for another one."""
    namespace, _, name = op._schema.name.partition("::")
    return name if namespace == "speccompile" else ""


def libraries_of(graphs: Iterable[fx.Graph]) -> tuple[str, ...]:
    """The libraries that ``graphs`` need: those of the ops that they call and that have no reference. Sorted."""
    targets = {node.target for graph in graphs for node in graph.nodes if isinstance(node.target, OpOverload)}
    return tuple(sorted({library for op in targets if (library := library_of(op)) and not has_reference(op)}))


def has_reference(op: OpOverload) -> bool:
    """Whether ``op`` has a reference in PyTorch, which runs on any device."""
    return is_explicit_composite(op)
