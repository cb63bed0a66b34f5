"""Instruction sets of this CPU and compiler, as Inductor detects them."""

from __future__ import annotations

import contextlib
import functools
from threading import Thread

from speccompile.utils.inductor_folder import make_inductor_folder_writable
from speccompile.utils.torch_private import cpu_vec_isa, import_inductor, inductor_config, pick_vec_isa


@functools.cache
def instruction_sets() -> Thread:
    """Start Inductor's detection in a thread. A caller that needs the result before the thread has ended runs the
    detection again.

    With AVX-512, Inductor would compile and load torch's vectors for a trial, which needs seconds. The trial is
    skipped, since the C++ ops use the same vectors. If these ops cannot be built, call :func:`try_vectors`.
    """
    # Imported outside of the thread: two threads that import parts of one package may see each other's partial imports.
    import_inductor()
    make_inductor_folder_writable()
    requested = inductor_config.cpp.vec_isa_ok
    granted = inductor_config.patch("cpp.vec_isa_ok", True) if requested is None else contextlib.nullcontext()

    def find() -> None:
        # A caller that needs the result runs the detection again, and receives the error.
        with contextlib.suppress(Exception):
            with granted:
                picked = pick_vec_isa()
            # Inductor calls this later. AVX2 does not use the granted result, and is tried.
            bool(picked)

    thread = Thread(target=find, name="speccompile-probe", daemon=True)
    thread.start()
    return thread


def try_vectors() -> None:
    """Clear Inductor's granted results, so it tries the vectors at the next call."""
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for isa in cpu_vec_isa.supported_vec_isa_list:
        # Instruction sets that extend another one cache their own result.
        forget = getattr(type(isa).__bool__, "cache_clear", None)
        if forget is not None:
            forget()
