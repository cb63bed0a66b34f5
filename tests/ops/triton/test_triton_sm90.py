"""Every Triton kernel compiles for sm_90 through Triton's own JIT, without a GPU, and spills next to nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.without_gpu import kernel_launches as of
from benchmarks.without_gpu.compiled import MOST_STACK, Compiled, compile_launch
from benchmarks.without_gpu.kernel_cases import EVERYTHING, LLAMA_8B, SMOLLM2, Case, cases
from benchmarks.without_gpu.kernels import (
    HEADER,
    MARK,
    PAGE,
    compiled,
    figures,
    labels,
    read_figures,
    table,
    version_line,
)
from speccompile.ops import triton as package
from speccompile.ops.triton.launch import Launch

Note = Callable[[str, object], None]

CASES = {f"{case.op}: {case.shape}": case for case in cases()}
LABELS = labels(CASES.values())
#: Of the committed table, if this compiler wrote it.
FIGURES = read_figures(PAGE.read_text()) if version_line() in PAGE.read_text() else {}
IN_SUITE = {name: case for name, case in CASES.items() if case.in_suite}
HALF = (torch.bfloat16, torch.float16)
#: Known faults: bytes of stack that newer versions of Triton spill, from that version on.
SPILLS = {"attention: Gemma 2 9B bfloat16 B=1 T=64 tree": ((3, 8), 208)}
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])


@pytest.mark.parametrize("name", IN_SUITE)
def test_a_kernel_fits(name: str, record_property: Note) -> None:
    """``record_property``: conftest.py prints what it receives after the tests' results. All other cases:
    ``python -m benchmarks.without_gpu.kernels``."""
    case = IN_SUITE[name]
    since, spilled = SPILLS.get(name, (TRITON, 0))
    for kernel in compiled(case):
        record_property("kernel", f"{kernel.name} {case.shape}: {kernel}")
        known = replace(kernel, stack=max(0, kernel.stack - spilled)) if since <= TRITON else kernel
        assert known.fits, f"{kernel.name} spills registers, or takes too much shared memory: {kernel}"
        written = FIGURES.get((kernel.name, LABELS[case.op, case.shape]), {figures(kernel)})
        assert figures(kernel) in written, "write the table: python -m benchmarks.without_gpu.kernels --write"


def test_every_kernel_has_a_case() -> None:
    """A kernel is what a Launch is made of."""
    launched = set()
    for path in Path(package.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Launch":
                kernels = [node.args[0]] if node.args else [k.value for k in node.keywords if k.arg == "kernel"]
                launched |= {ast.unparse(kernel) for kernel in kernels}
    assert len(launched) > 20
    assert launched <= {launch.kernel.__name__ for case in IN_SUITE.values() for launch in case.launches()}


def test_the_committed_table_has_every_case() -> None:
    page = PAGE.read_text()
    assert f"| {' | '.join(HEADER)} |" in page.partition(MARK)[2]
    of_page = {label for _, label in read_figures(page)}
    assert set(LABELS.values()) <= of_page, "write the table: python -m benchmarks.without_gpu.kernels --write"


# --- faults are seen ---------------------------------------------------------------------------------


@triton.jit
def _named_as_triton_names_streams(out, stream):  # type: ignore[no-untyped-def]
    tl.store(out, stream)


def test_a_parameter_that_triton_refuses_is_seen() -> None:
    """The launcher asserts on it; a signature that a test builds by itself does not."""
    with pytest.raises(AssertionError, match="stream"):
        compile_launch(Launch(_named_as_triton_names_streams, (1,), {"out": of.meta(1), "stream": 3}))


def test_a_missing_argument_is_seen() -> None:
    launch = of.within_top(torch.float32)
    arguments = dict(list(launch.arguments.items())[1:])
    with pytest.raises(TypeError):
        compile_launch(replace(launch, arguments=arguments))


def test_a_spill_is_seen() -> None:
    """32 registers are too few: the report is not 0 whatever is compiled."""
    partial, _ = of.attention(LLAMA_8B, 1, 8)
    squeezed = compile_launch(replace(partial, most_registers=32))
    assert squeezed.stack > MOST_STACK and not squeezed.fits


def test_too_much_shared_memory_is_seen() -> None:
    assert Compiled("kernel", 4, 32, 0, 227 << 10, "").fits
    assert not Compiled("kernel", 4, 32, 0, (227 << 10) + 1, "").fits


def test_shapes_that_take_the_same_share_a_line() -> None:
    kernel, other = Compiled("kernel", 4, 32, 0, 1024, ""), Compiled("kernel", 4, 33, 0, 1024, "")
    lines = table([("T=1", kernel), ("T=8", other), ("T=2", kernel)])
    assert lines[2:] == ["| kernel | T=1; T=2 | 4 | 32 | 0 | 1,024 |", "| kernel | T=8 | 4 | 33 | 0 | 1,024 |"]


# --- what the code has, and has not ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_only_half_precision_goes_to_the_tensor_cores(dtype: torch.dtype) -> None:
    """They would cut float32 to 10 bits."""
    partial, combine = map(compile_launch, of.attention(LLAMA_8B, 1, 8, dtype))
    assert ("mma" in partial.ptx) == (dtype in HALF)
    assert "mma" not in combine.ptx
    _, multiply = map(compile_launch, of.experts(8, dtype))
    assert ("mma" in multiply.ptx) == (dtype in HALF)


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_no_logarithm_of_noise_is_approximate(drawn: bool) -> None:
    """It would be wrong near 1, where large Gumbels come from."""
    for launch in of.choose(50257, 64, 17, drawn=drawn):
        assert "lg2.approx" not in compile_launch(launch).ptx


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_filters_add_no_floats_in_an_order_of_chance(tree: bool) -> None:
    """Sums of floats would depend on the order in which programs end; a quotient is torch's own."""
    for launch in of.filtered(151936, tree=tree):
        assert not re.search(r"(atom|red)\S*\.f(32|64)|div\.(full|approx)|lg2\.approx", compile_launch(launch).ptx)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_rounded_weights_are_multiplied_as_integers(form: str) -> None:
    _, multiply, _ = map(compile_launch, of.rounded(form, 8))
    assert "dp4a.s32.s32" in multiply.ptx and "mma" not in multiply.ptx


# --- one machine code for all shapes: the order of reduction and where it rounds are then the same too ------


def _ptx(launches: Sequence[Launch]) -> list[str]:
    return [compile_launch(launch).ptx for launch in launches]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_in_fixed_order_one_code_of_attention_serves_every_shape(dtype: torch.dtype) -> None:
    shapes = [(1, 1), (4, 1), (1, 8), (3, 5), (2, 16)]
    codes = [_ptx(of.attention(SMOLLM2, rows, width, dtype, fixed_order=True)) for rows, width in shapes]
    assert all(code == codes[0] for code in codes)


@pytest.mark.parametrize("op", ["delta_rule", "scan"])
def test_one_code_of_a_recurrence_serves_every_width(op: str) -> None:
    """A state's bits do not depend on the widths of its steps."""
    codes = [
        _ptx(of.delta_rule(16, 16, 128, 1, width) if op == "delta_rule" else of.scan(48, 1, 64, 128, 1, width))
        for width in (1, 5, 16)
    ]
    assert all(code == codes[0] for code in codes)


def test_one_code_of_a_skinny_linear_serves_every_number_of_rows() -> None:
    codes = [_ptx([of.skinny(4096, 6144, rows=rows)]) for rows in (1, 2, 8, 16)]
    assert all(code == codes[0] for code in codes) and "mma" in codes[0][0]


def test_one_code_of_experts_serves_every_width() -> None:
    codes = [_ptx(of.experts(tokens)) for tokens in (1, 5, 16)]
    assert all(code == codes[0] for code in codes)


def test_options_of_attention_are_compiled_in() -> None:
    plain, everything = (_ptx(of.attention(heads, 1, 8)) for heads in (LLAMA_8B, replace(EVERYTHING, chunk=None)))
    assert plain != everything


def test_cases_have_different_names() -> None:
    assert len(CASES) == len(list(cases())) and isinstance(next(cases()), Case)
