"""Builds the C++ ops once for this machine, keeps them, and loads them."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions, get_cpp_compiler
from torch._inductor.cpu_vec_isa import VecISA, invalid_vec_isa, pick_vec_isa

from speccompile.paths import cache_dir
from speccompile.progress import task

SOURCES = Path(__file__).parent / "csrc"
# Multiply-adds are written where they are meant. Left to the compiler, two tiles could round differently.
FLAGS = ("-ffp-contract=off", "-fno-math-errno")


@functools.cache
def load_cpu_ops() -> str | None:
    """Make ``torch.ops.speccompile``'s C++ ops callable, built for this CPU (or what ``ATEN_CPU_CAPABILITY`` says).

    Returns:
        Why they are not to be had, or None.
    """
    if os.name == "nt":
        return "the C++ ops are built with GCC's or Clang's options only"
    try:
        compiler = get_cpp_compiler()
    except RuntimeError:
        return "no C++ compiler was found"
    if shutil.which(compiler) is None:
        return "no C++ compiler was found"
    isa = pick_vec_isa()
    target = cache_dir() / "cpu-ops" / f"{_key(compiler, isa)}.so"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.exists():
                _build(isa, target)
    except OSError as error:
        return f"the cache folder cannot be written ({error})"
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return f"the C++ compiler failed: {str(error).strip().splitlines()[-1]}"
    torch.ops.load_library(str(target))
    return None


def vector_name() -> str:
    """What the ops are built for: ``avx512``, ``avx2``, ... or ``plain C++``."""
    return str(pick_vec_isa()).split()[0] if pick_vec_isa() else "plain C++"


def _key(compiler: str, isa: VecISA) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = [torch.__version__, version, str(isa), *FLAGS]
    parts += [path.name + path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _build(isa: VecISA, target: Path) -> None:
    sources = sorted(str(path) for path in SOURCES.glob("*.cpp"))
    capability = "DEFAULT" if isa is invalid_vec_isa else isa.build_macro()[0].removeprefix("CPU_CAPABILITY_")
    flags = [*FLAGS, f"-DCPU_CAPABILITY={capability}"]
    options = CppTorchOptions(vec_isa=isa, include_pytorch=True, extra_flags=flags)
    with task("compile the CPU ops"), tempfile.TemporaryDirectory(dir=target.parent) as folder:
        builder = CppBuilder(target.stem, sources, options, folder)
        builder.build()
        os.replace(builder.get_target_file_path(), target)
