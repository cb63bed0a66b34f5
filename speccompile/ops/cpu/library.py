"""Builds libraries of C++ ops once for this machine, keeps them, and loads them.

Every folder of ``csrc`` is a library. What each step calls is in ``base``; the others, for what few models and options
need, are built when a step calls one of their ops (:mod:`speccompile.ops.in_cpp`). They call functions of ``base``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import torch
from filelock import FileLock

from speccompile.utils.forks import in_child
from speccompile.utils.inductor_folder import write_error
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
BASE = "base"
LIBRARIES = tuple(sorted(path.name for path in SOURCES.iterdir() if path.is_dir()))
# Multiply-adds are written where they are meant. Left to the compiler, two tiles could round differently.
# Inductor's options tune for the machine's CPU. Tuned so, GCC's inner loop of eight rows is a third slower on AMD's
# Zen 3. Warnings are off: those about torch's headers fill megabytes.
FLAGS = ("-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-mtune=generic", "-w", "-g0")
# Ops only prepare calls of kernels. With -O3 they would take a third longer to compile and be no faster.
FLAGS_OF_OPS = ("-O1",)

_found: dict[str, Future[Path]] = {}
_loaded: set[str] = set()
_when_loaded: dict[str, list[Callable[[], None]]] = {}
_failures: dict[str, str] = {}


def missing_tools() -> str | None:
    """Reason why the C++ ops cannot be built on this machine, found without a build; None: no reason was found."""
    if os.name == "nt":
        return "the C++ ops are built with GCC's or Clang's options only"
    try:
        compiler = get_cpp_compiler()
    except RuntimeError:
        return "no C++ compiler was found"
    return None if shutil.which(compiler) else "no C++ compiler was found"


def cpu_ops(library: str = BASE) -> Future[Path]:
    """A library of C++ ops for this CPU (or for ``ATEN_CPU_CAPABILITY``), built in the background."""
    if library in _found:
        return _found[library]
    probes = instruction_sets()
    found = _found[library] = Future()
    # Read here: the environment may change before the thread runs, and the thread has its own stack.
    folder, call_site = cache_dir() / "cpu-ops", calling_line()

    def find() -> None:
        probes.join()
        try:
            with on_behalf_of(call_site):
                found.set_result(_library_in(folder, library))
        except BaseException as error:
            found.set_exception(error)

    # Not a daemon: the interpreter waits for it, so the library is complete.
    Thread(target=find, name=f"speccompile-cpu-ops-{library}").start()
    return found


def _after_fork() -> None:
    """In a forked child, which does not have the threads that build libraries, and builds them itself."""
    for library in [library for library, found in _found.items() if not found.done()]:
        del _found[library]


in_child(_after_fork)


def load_cpu_ops(*libraries: str) -> str | None:
    """Wait for C++ ops of ``torch.ops.speccompile``, and load them.

    Args:
        libraries: the libraries to load in addition to ``base``.

    Returns:
        Why they are not available, or None.
    """
    needed = [library for library in dict.fromkeys((BASE, *libraries)) if library not in _loaded]
    if needed and (reason := missing_tools()) is not None:
        return reason
    for library in needed:
        # All of them are built in parallel.
        cpu_ops(library)
    for library in needed:
        if library not in _failures:
            if (reason := _failure(library)) is None:
                _loaded.add(library)
                for action in _when_loaded.pop(library, ()):
                    action()
            else:
                _failures[library] = reason
                # The reason may be the vectors of this CPU, which Inductor's code uses as well.
                try_vectors()
        if library in _failures:
            return _failures[library]
    return None


def when_loaded(library: str, action: Callable[[], None]) -> None:
    """Call ``action`` once, when ``library`` is loaded, or now if it is."""
    if library in _loaded:
        action()
    else:
        _when_loaded.setdefault(library, []).append(action)


def forget_failures() -> None:
    """Let libraries that could not be built or loaded be tried again: what was wrong may be mended."""
    if _failures:
        # What failed for one has failed or fails for all that were begun with it.
        for library in _found.keys() - _loaded:
            del _found[library]
        _failures.clear()


def _failure(library: str) -> str | None:
    try:
        path = cpu_ops(library).result()
        if _load_error(path) is not None:
            # A crash of the machine may leave an empty file.
            path.unlink()
            if (problem := _load_error(_library(path.parent, library))) is not None:
                return f"the library of the C++ ops does not load: {problem}"
    except OSError as error:
        return f"a cache folder cannot be written ({error})"
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return f"the C++ compiler failed: {_first_error(str(error))}"
    return None


def _first_error(output: str) -> str:
    """The first error in a compiler's output. Excerpts and consequential errors follow it."""
    lines = output.strip().splitlines()
    return next((line.strip() for line in lines if " error: " in line), lines[-1])


def _load_error(path: Path) -> str | None:
    try:
        _load(str(path))
    except OSError as error:
        return str(error)
    return None


def _load(library: str) -> None:
    torch.ops.load_library(library)
    # Inductor's code finds the shims among global symbols, and the other libraries what they call of ``base``.
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def vector_name() -> str:
    """The vectors that the ops are built for: ``avx512``, ``avx2``, ... or ``plain C++``."""
    return str(pick_vec_isa()).split()[0] if pick_vec_isa() else "plain C++"


def build_key(library: str) -> str:
    """Hash of a library's sources, of the compiler, and of what they are compiled for."""
    return _key(library, get_cpp_compiler(), pick_vec_isa())


def _key(library: str, compiler: str, isa: VecISA) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = [torch.__version__, version, str(isa), *FLAGS, *FLAGS_OF_OPS]
    # Every library includes headers of the first one.
    for folder in dict.fromkeys((BASE, library)):
        parts += [path.name + path.read_text() for path in sorted(Path(SOURCES, folder).rglob("*.*"))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _library_in(folder: Path, library: str) -> Path:
    """In ``folder``, or, if that cannot be written and has none, in a folder of this process."""
    # It writes into Inductor's folder, which is another one.
    pick_vec_isa()
    try:
        return _library(folder, library)
    except Exception as error:
        # The compiler is another process: its message reports a full disk.
        unwritten = error if isinstance(error, OSError) else write_error(error)
        spare = None if unwritten is None else spare_dir(folder.parent, unwritten)
        if spare is None:
            raise
        return _library(spare / folder.name, library)


def _library(folder: Path, library: str) -> Path:
    isa = pick_vec_isa()
    target = folder / f"{library}-{_key(library, get_cpp_compiler(), isa)}.so"
    if target.exists():
        # Without the lock, which needs a writable folder.
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.exists():
            _build(library, isa, target)
    return target


def _build(library: str, isa: VecISA, target: Path) -> None:
    capability = "DEFAULT" if isa is invalid_vec_isa else isa.build_macro()[0].removeprefix("CPU_CAPABILITY_")
    flags = [*FLAGS, f"-DCPU_CAPABILITY={capability}"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:

        def build(name: str, sources: list[str], *, objects: bool) -> str:
            own = FLAGS_OF_OPS if name == "ops" else ()
            options = CppTorchOptions(
                vec_isa=isa, include_pytorch=True, extra_flags=[*flags, *own], compile_only=objects
            )
            builder = CppBuilder(name, sources, options, folder)
            builder.build()
            path: str = builder.get_target_file_path()
            return path

        units = _units(library, Path(folder))
        with ThreadPoolExecutor(len(units), initializer=_lower_priority) as compilers:
            compiled = compilers.map(lambda path: build(path.stem, [str(path)], objects=True), units)
            linked = build(target.stem, list(compiled), objects=False)
        os.replace(linked, target)


def _lower_priority() -> None:
    """Leave a core to the capture, which is slower. On Linux a priority belongs to a thread and its processes.

    Of two cores with two busy programs on them, a thread of this priority gets almost half of one. With the
    priority 10 it got a tenth, and a wrap waited minutes for it.
    """
    if sys.platform == "linux":
        os.nice(4)


def _units(library: str, folder: Path) -> list[Path]:
    """One file for each folder of a library's sources, which includes all of them: the compiler spends more time on
    torch's headers than on the sources. The files are compiled in parallel; more of them would slow the capture of the
    model.
    """
    units = []
    for sources in sorted({path.parent for path in Path(SOURCES, library).rglob("*.cpp")}):
        unit = folder / f"{sources.name}.cpp"
        unit.write_text("".join(f'#include "{path}"\n' for path in sorted(sources.glob("*.cpp"))))
        units.append(unit)
    return units
