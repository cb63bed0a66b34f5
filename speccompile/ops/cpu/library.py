"""Builds the C++ ops once for this machine, keeps them, and loads them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import torch
from filelock import FileLock

from speccompile.utils.forks import in_child
from speccompile.utils.instruction_sets import instruction_sets, try_vectors
from speccompile.utils.paths import cache_dir
from speccompile.utils.storage import spare_dir
from speccompile.utils.torch_private import (
    CppBuilder,
    CppTorchOptions,
    VecISA,
    get_cpp_compiler,
    invalid_vec_isa,
    pick_vec_isa,
)
from speccompile.utils.warn import calling_line, on_behalf_of

SOURCES = Path(__file__).parent / "csrc"
# Multiply-adds are written where they are meant. Left to the compiler, two tiles could round differently.
# Tuned for the very CPU, as Inductor asks for, GCC makes the inner loop of eight rows a third slower on AMD's Zen 3.
# What torch's own headers are warned of is not ours, and fills megabytes.
FLAGS = ("-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-mtune=generic", "-w", "-g0")


def missing_tools() -> str | None:
    """Why the C++ ops cannot be built on this machine, as far as that is known at once. None if they can."""
    if os.name == "nt":
        return "the C++ ops are built with GCC's or Clang's options only"
    try:
        compiler = get_cpp_compiler()
    except RuntimeError:
        return "no C++ compiler was found"
    return None if shutil.which(compiler) else "no C++ compiler was found"


@functools.cache
def cpu_ops() -> Future[Path]:
    """The library of the C++ ops for this CPU (or what ``ATEN_CPU_CAPABILITY`` says), built beside other work."""
    probes = instruction_sets()
    found: Future[Path] = Future()
    # Read here: the environment may change before the thread runs, and the thread has its own stack.
    folder, call_site = cache_dir() / "cpu-ops", calling_line()

    def find() -> None:
        probes.join()
        try:
            with on_behalf_of(call_site):
                found.set_result(_library_in(folder))
        except BaseException as error:
            found.set_exception(error)

    # Not a daemon: the interpreter waits for it, so the library is complete.
    Thread(target=find, name="speccompile-cpu-ops").start()
    return found


def _after_fork() -> None:
    """In a forked child, which does not have the thread that builds the library, and builds it itself."""
    if cpu_ops.cache_info().currsize and not cpu_ops().done():
        cpu_ops.cache_clear()


in_child(_after_fork)


@functools.cache
def load_cpu_ops() -> str | None:
    """Wait for the C++ ops of ``torch.ops.speccompile``, and make them callable.

    Returns:
        Why they are not available, or None.
    """
    reason = missing_tools()
    if reason is None and (reason := _failure()) is not None:
        # The reason may be the vectors of this CPU, which Inductor's code uses as well.
        try_vectors()
    return reason


def _failure() -> str | None:
    try:
        library = cpu_ops().result()
        if _load_error(library) is not None:
            # A crash of the machine may leave an empty file.
            library.unlink()
            if (problem := _load_error(_library(library.parent))) is not None:
                return f"the library of the C++ ops does not load: {problem}"
    except OSError as error:
        return f"the cache folder cannot be written ({error})"
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return f"the C++ compiler failed: {_first_error(str(error))}"
    return None


def _first_error(output: str) -> str:
    """The first error in a compiler's output. Excerpts and consequential errors follow it."""
    lines = output.strip().splitlines()
    return next((line.strip() for line in lines if " error: " in line), lines[-1])


def _load_error(library: Path) -> str | None:
    try:
        _load(str(library))
    except OSError as error:
        return str(error)
    return None


def _load(library: str) -> None:
    torch.ops.load_library(library)
    # Inductor's code finds the shims among global symbols.
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def vector_name() -> str:
    """The vectors that the ops are built for: ``avx512``, ``avx2``, ... or ``plain C++``."""
    return str(pick_vec_isa()).split()[0] if pick_vec_isa() else "plain C++"


def _key(compiler: str, isa: VecISA) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = [torch.__version__, version, str(isa), *FLAGS]
    parts += [path.name + path.read_text() for path in sorted(SOURCES.rglob("*.*"))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _library_in(folder: Path) -> Path:
    """In ``folder``, or, if that cannot be written and has none, in a folder of this process."""
    try:
        return _library(folder)
    except OSError as error:
        spare = spare_dir(folder.parent, error)
        if spare is None:
            raise
        return _library(spare / folder.name)


def _library(folder: Path) -> Path:
    isa = pick_vec_isa()
    target = folder / f"{_key(get_cpp_compiler(), isa)}.so"
    if target.exists():
        # Without the lock, which needs a writable folder.
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.exists():
            _build(isa, target)
    return target


def _build(isa: VecISA, target: Path) -> None:
    capability = "DEFAULT" if isa is invalid_vec_isa else isa.build_macro()[0].removeprefix("CPU_CAPABILITY_")
    flags = [*FLAGS, f"-DCPU_CAPABILITY={capability}"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:

        def build(name: str, sources: list[str], *, objects: bool) -> str:
            options = CppTorchOptions(vec_isa=isa, include_pytorch=True, extra_flags=flags, compile_only=objects)
            builder = CppBuilder(name, sources, options, folder)
            builder.build()
            path: str = builder.get_target_file_path()
            return path

        units = _units(Path(folder))
        with ThreadPoolExecutor(len(units), initializer=_lower_priority) as compilers:
            compiled = compilers.map(lambda path: build(path.stem, [str(path)], objects=True), units)
            library = build(target.stem, list(compiled), objects=False)
        os.replace(library, target)


def _lower_priority() -> None:
    """Leave the cores to the capture, which takes longer. On Linux a priority belongs to a thread and its processes."""
    if sys.platform == "linux":
        os.nice(10)


def _units(folder: Path) -> list[Path]:
    """One file for each folder of sources, which includes all of them: torch's headers take the compiler longer than
    our sources. The files are compiled in parallel; more of them would slow the capture of the model.
    """
    units = []
    for sources in sorted(SOURCES.iterdir()):
        unit = folder / f"{sources.name}.cpp"
        unit.write_text("".join(f'#include "{path}"\n' for path in sorted(sources.glob("*.cpp"))))
        units.append(unit)
    return units
