"""Which library the C++ form of an op is in: what the ops say, and what the sources have."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

import speccompile.lowering.stage_ops  # defines all ops
import speccompile.ops
from speccompile.ops.cpu.library import BASE, LIBRARIES, SOURCES, load_cpu_ops
from speccompile.ops.in_cpp import IN_BODIES, libraries_of, library_of

ops = torch.ops.speccompile

OPS = ("native_attention", "native_lora", "native_expert_linear")
#: What a process has loaded after it has imported the ops, and then all that a wrap needs; and what it can call after
#: it has loaded a library.
PROGRAM = f"""
import sys, torch
import speccompile.ops
from speccompile.ops.cpu import library

print(*sys.modules)
print(library._loaded, library._found)
import speccompile.wrapping, speccompile.lowering.stage_ops
print("speccompile.ops.triton" in sys.modules)
assert library.load_cpu_ops("lora") is None
print(*(int(torch._C._dispatch_has_kernel_for_dispatch_key("speccompile::" + name, "CPU")) for name in {OPS}))
"""


@functools.cache
def told() -> list[str]:
    """By a process of its own."""
    assert load_cpu_ops("lora", "experts") is None, "built once, for this test and others"
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.splitlines()


def in_sources(library: str) -> set[str]:
    """The ops that the sources of ``library`` register."""
    texts = (path.read_text() for path in (SOURCES / library).rglob("*.cpp"))
    return {name for text in texts for name in re.findall(r'm\.impl\(\s*"(\w+)"', text)}


@pytest.mark.parametrize("library", LIBRARIES)
def test_ops_say_the_library_that_their_sources_are_in(library: str) -> None:
    found = in_sources(library)
    assert found and {library_of(getattr(ops, name).default) for name in found} == {library}


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_is_built_and_loaded(library: str) -> None:
    assert load_cpu_ops(library) is None


def test_every_op_that_bodies_call_has_a_c_function() -> None:
    assert load_cpu_ops(*LIBRARIES) is None
    loaded = ctypes.CDLL(None)
    assert (
        "native_rotary_attention" in IN_BODIES and "native_lora" in IN_BODIES and len(set(IN_BODIES)) == len(IN_BODIES)
    )
    assert [name for name in IN_BODIES if not hasattr(loaded, f"aoti_torch_cpu_{name}")] == []


def test_the_package_imports_every_file_of_ops() -> None:
    loaded, folder = set(told()[0].split()), Path(speccompile.ops.__file__).parent
    assert {f"speccompile.ops.{path.stem}" for path in folder.glob("[!_]*.py")} <= loaded
    assert "speccompile.ops.triton" not in loaded


def test_an_import_of_the_package_loads_no_library() -> None:
    assert told()[1] == "set() {}"


def test_nothing_needs_triton_before_a_kernel_runs() -> None:
    """It is an optional dependency, and slow to import."""
    assert told()[2] == "False"


def test_other_ops_are_in_none() -> None:
    assert library_of(torch.ops.aten.mm.default) is None
    assert library_of(ops.lora.default) is None


def test_libraries_of_graphs() -> None:
    graphs = [fx.Graph(), fx.Graph(), fx.Graph()]
    x = graphs[0].placeholder("x")
    graphs[0].call_function(ops.native_lora.default, (x,))
    graphs[0].call_function(torch.ops.aten.relu.default, (x,))
    graphs[1].call_function(ops.native_attention.default)
    assert libraries_of(graphs[2:]) == ()
    assert libraries_of(graphs) == (BASE, "lora")


def test_an_op_with_a_reference_needs_no_library() -> None:
    graph = fx.Graph()
    graph.call_function(ops.accept_commit_.default)
    assert library_of(ops.accept_commit_.default) == BASE and libraries_of([graph]) == ()


def test_a_process_loads_what_it_asks_for_and_nothing_else() -> None:
    assert told()[3].split() == ["1", "1", "0"]
