"""Bodies of families, compiled by Inductor for an H100 that is not there."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.without_gpu.bodies import cuda_code
from benchmarks.without_gpu.compiled import MOST_SHARED, MOST_STACK
from benchmarks.without_gpu.counting import TIERS, Launches, launches_of, wrapped
from benchmarks.without_gpu.hopper import hopper
from benchmarks.without_gpu.launches import PAGE, read_rows
from benchmarks.without_gpu.models import MODELS, Model
from speccompile.graph.body import Body
from speccompile.lowering.kernel_list import KernelCall, kernels_called
from support.inductor_kernels import kernels_in, resources

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "speccompile.skinny_linear: multiply_few_rows"}
#: Bytes that a float32 sine keeps to reduce a large argument.
SINE_STACK = 32


#: Those whose layers differ most, of ten. The others lengthen the suite by minutes: set this to test them, too.
ALL = "SPECCOMPILE_ALL_CUDA_BODIES"
FAMILIES = ("gemma2", "gpt_oss", "qwen3_next", "bamba")


@pytest.mark.parametrize(
    "model",
    [model for model in MODELS[1:] if model.family in FAMILIES or ALL in os.environ],
    ids=lambda model: model.family,
)
def test_bodies_of_a_family(model: Model, tmp_path: Path) -> None:
    """Launches are those of the table, kernels fit, products are not Inductor's, and state is written where it lies."""
    with wrapped(model) as spec, hopper():
        tiers = [spec.engine.tiers[draft_len, 1, "greedy"] for draft_len in TIERS]
        _assert_as_in_the_table(model, [launches_of(tier, model.stands_for) for tier in tiers])
        graph = tiers[0].graph
        code = cuda_code(graph)
        in_parts, compiled = (kernels_called(graph, "cuda", codes) for codes in ({}, code))
    for name, body in graph.bodies.items():
        assert _products(in_parts, name) == _products(compiled, name)
        assert _products(compiled, name) > 0 or body.part != "layers"
        _assert_state_stays(body, code[name])
        for kernel in kernels_in(code[name]).values():
            usage = resources(kernel, tmp_path)
            most = SINE_STACK if ".sin(" in kernel.source else MOST_STACK
            assert usage["STACK"] <= most and usage["shared"] <= MOST_SHARED, (kernel.name, usage)


def _assert_as_in_the_table(model: Model, found: list[Launches]) -> None:
    row = read_rows(PAGE.read_text())[model.name]
    totals = " / ".join(str(launches.total) for launches in found)
    assert totals == row["greedy"], f"{found}; write the new table: python -m benchmarks.without_gpu.launches --write"


def _products(calls: tuple[KernelCall, ...], body: str) -> int:
    """The products of a body that are torch's or a kernel of the package: not those that Inductor writes."""
    return sum(call.calls for call in calls if call.caller == body and call.name.removeprefix("aten.") in PRODUCTS)


def _assert_state_stays(body: Body, code: str) -> None:
    for index, dims in enumerate(body.dims):
        for place, dim in enumerate(dims):
            if dim in ("N", "S") and (
                size := re.search(rf"^ +(\w+) = arg{index}_1_size\[{place}\]", code, re.MULTILINE)
            ):
                allocated = re.findall(rf"empty_strided_cuda\(\([^)]*\b{size[1]}\b.*", code)
                assert not allocated, "a body must not copy the state of all slots"
    written = set(_written(code))
    assert {f"arg{index}_1" for index in body.mutates} <= written


def _written(code: str) -> Iterator[str]:
    """The arguments that the module's kernels, and ops of the package, write in place."""
    kernels = kernels_in(code)
    (entry,) = {
        ast.unparse(node): node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.FunctionDef) and node.name == "call"
    }.values()
    for call in (node for node in ast.walk(entry) if isinstance(node, ast.Call)):
        function = ast.unparse(call.func)
        kernel = kernels.get(function.removesuffix(".run"))
        if kernel is not None:
            given = dict(zip(kernel.parameters, map(ast.unparse, call.args), strict=False))
            yield from (given[parameter] for parameter in kernel.mutated)
        elif function.startswith("torch.ops.speccompile."):
            op = getattr(torch.ops.speccompile, function.split(".")[3]).default
            for argument, value in zip(op._schema.arguments, call.args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    yield ast.unparse(value)


def test_a_copy_of_state_is_seen() -> None:
    """As Inductor writes it for an update that it cannot do in place."""
    body = Body(
        "layer", torch.fx.GraphModule({}, torch.fx.Graph()), (("N", "S", 2),), (torch.bfloat16,), (), {},
        frozenset({0}), (0,), "",
    )  # fmt: skip
    code = "def call(args):\n    s6 = arg0_1_size[0]\n    s7 = arg0_1_size[1]\n"
    with pytest.raises(AssertionError):
        _assert_state_stays(body, code)
    with pytest.raises(AssertionError, match="copy the state"):
        _assert_state_stays(body, code + "    buf0 = empty_strided_cuda((s6, s7, 2), (2*s7, 2, 1), torch.bfloat16)\n")
