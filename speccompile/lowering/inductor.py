"""Compilation of an outlined body, once for all layers, tiers, prefill and arena sizes.

The recipe (a separate ShapeEnv, duck-shaped fakes, ``dynamic_shapes="from_graph"``) keeps rows, width, slots and cache
length symbolic, rows and width from 1 upwards. KV is written in place. Keys and values need separate example storages,
or AOTAutograd would treat them as aliases.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from speccompile.errors import LoweringError, error_line
from speccompile.graph.body import Body, size_of
from speccompile.graph.state import primes_clear_of
from speccompile.ops import lora
from speccompile.ops.cpu.shims import shims
from speccompile.utils.devices import traits_of
from speccompile.utils.inductor_folder import (
    VARIABLE,
    replaced_inductor_folder,
    write_error,
)
from speccompile.utils.torch_private import (
    INDUCTOR_LOG,
    CompiledArtifact,
    ConstantSource,
    FakeTensorMode,
    OpOverload,
    decomposed,
    enable_python_dispatcher,
    inductor_cache_dir,
    inductor_config,
    pick_vec_isa,
    standalone_compile,
)
from speccompile.utils.tracer_isolation import traced_alone

aten = torch.ops.aten


def folder_advice() -> str:
    folder = replaced_inductor_folder() or inductor_cache_dir()
    return f"Set {VARIABLE} to a folder that can be written: {folder} cannot be written"


def compile_body(body: Body, device: torch.device) -> CompiledArtifact:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = _example_inputs(body, device, mode)
    module = _returning_tuple(body)
    # In C++ some composite ops (linear before torch 2.12) do not accept symbolic sizes.
    with mode, torch.no_grad(), enable_python_dispatcher():
        results = module(*fakes)
    for returned, result in zip(cast(Any, module.graph.output_node().args[0]), results, strict=True):
        returned.meta["val"] = returned.meta["example_value"] = result
    try:
        in_parts: dict[OpOverload, Callable[..., Any]] = {}
        if traits_of(device).cpp_ops:
            # The op for adapters is decomposed: C++ crashes when it calls a Python op that returns a list (torch 2.13).
            in_parts = {torch.ops.speccompile.lora.default: lora.reference}
        with (
            torch.no_grad(),
            inductor_config.patch(settings(device)),
            decomposed(in_parts),
            _without_hints(),
            traced_alone(),
        ):
            return standalone_compile(module, fakes, dynamic_shapes="from_graph")
    except Exception as error:
        message = f"Inductor could not compile {body.name!r}: {error}"
        if write_error(error):
            message += f". {folder_advice()}"
        raise LoweringError(message, body=body.name, reason=error_line(error)) from error


def settings(device: torch.device) -> dict[str, Any]:
    """Return Inductor's settings for bodies on ``device`` that differ from its defaults."""
    traits = traits_of(device)
    # Inputs are arena tensors and captured weights, whose sizes are known. Checking them again at every layer of every
    # step needs more time than some kernels.
    options: dict[str, Any] = {"size_asserts": False}
    if traits.cpp_ops:
        # Python between the kernels also needs more time than some kernels.
        options |= {"cpp_wrapper": True, "aot_inductor.custom_ops_to_c_shims": shims()}
        # Inductor's cache key has the settings, but not the vector width that code was written for. Without this entry
        # it would load code for another width of this machine, which would write out of bounds.
        # The number of OpenMP threads is read when the step runs.
        options["cpp.dynamic_threads"] = True
        options["cpp.simdlen"] = pick_vec_isa().bit_width()
    if traits.triton_ops:
        # One launch for kernels that do not depend on one another: the rotary embedding of queries, and that of keys
        # with the write of KV, which have other sizes.
        options["combo_kernels"] = True
        # A padded product copies its weight in every step, if a measurement at compile time prefers that.
        options["shape_padding"] = False
        # Otherwise a measurement at the first launch chooses the order of sums of a short reduction, and two builds
        # would differ in bits.
        options["deterministic"] = True
    return options


@contextlib.contextmanager
def _without_hints() -> Iterator[None]:
    """Silence Inductor's log of torch ops without a C function, which a user cannot change."""

    def is_none(record: logging.LogRecord) -> bool:
        return "is missing a c-shim" not in record.getMessage()

    log = logging.getLogger(INDUCTOR_LOG)
    log.addFilter(is_none)
    try:
        yield
    finally:
        log.removeFilter(is_none)


def _example_inputs(body: Body, device: torch.device, mode: FakeTensorMode) -> list[Any]:
    """Create fakes with a symbol for each named size. The device need not exist: nothing is allocated on it."""
    examples = _example_sizes(body)
    fakes = []
    for index, (dims, dtype) in enumerate(zip(body.dims, body.dtypes, strict=True)):
        shape = [size_of(size, examples) for size in dims]
        dynamic = [DimDynamic.DUCK if isinstance(size, str) else DimDynamic.STATIC for size in dims]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
        example = torch.empty(shape, dtype=dtype, device="meta")
        sizes = mode.from_tensor(example, symbolic_context=context, source=ConstantSource(f"input_{index}")).shape
        with mode:
            fakes.append(torch.empty(sizes, dtype=dtype, device=device))
    return fakes


def _example_sizes(body: Body) -> dict[str, int]:
    """Return primes for B, T, N, S, P and M that divide no fixed size of the body. Duck shaping then distinguishes all
    sizes."""
    fixed = {size for dims in body.dims for size in dims if isinstance(size, int)}
    return dict(zip(("B", "T", "N", "S", "P", "M"), primes_clear_of(fixed), strict=False))


def _returning_tuple(body: Body) -> fx.GraphModule:
    graph = fx.Graph()
    result: Any = graph.graph_copy(body.module.graph, {})
    graph.output(result if isinstance(result, tuple) else (result,))
    for node in graph.find_nodes(op="call_function", target=aten.baddbmm.default):
        _split_baddbmm(graph, node)
    for node in graph.nodes:
        node.meta.clear()
    return fx.GraphModule(torch.nn.Module(), graph, class_name=body.name)


def _split_baddbmm(graph: fx.Graph, node: fx.Node) -> None:
    """Split ``baddbmm`` into parts, since its shape function fails on symbolic sizes (torch 2.13). Inductor fuses the
    parts again."""
    added, left, right = node.args
    with graph.inserting_before(node):
        product = graph.call_function(aten.bmm.default, (left, right))
        scaled = graph.call_function(aten.mul.Scalar, (product, node.kwargs.get("alpha", 1)))
        kept = graph.call_function(aten.mul.Scalar, (added, node.kwargs.get("beta", 1)))
        total = graph.call_function(aten.add.Tensor, (kept, scaled))
    node.replace_all_uses_with(total)
    graph.erase_node(node)
