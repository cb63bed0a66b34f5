"""What this CPU and compiler can do, as Inductor finds it out."""

from __future__ import annotations

import contextlib
import functools
from threading import Thread

from speccompile.utils.inductor_folder import make_inductor_folder_writable
from speccompile.utils.torch_private import cpu_vec_isa, import_inductor, inductor_config, pick_vec_isa


@functools.cache
def instruction_sets() -> Thread:
    """Let Inductor find out beside other work. Who asks it before the thread has ended begins anew.

    With AVX-512, torch's vectors are not compiled and loaded for trial, which takes seconds: the C++ ops are made of
    them. Where those do not come about, see :func:`try_vectors`.
    """
    # Not in the thread: two threads that import parts of one package at a time may see each other's half of it.
    import_inductor()
    make_inductor_folder_writable()
    asked = inductor_config.cpp.vec_isa_ok
    granted = inductor_config.patch("cpp.vec_isa_ok", True) if asked is None else contextlib.nullcontext()

    def find() -> None:
        # A caller that needs the answer asks again, and receives the error.
        with contextlib.suppress(Exception):
            with granted:
                picked = pick_vec_isa()
            # Inductor will ask it whether it works. AVX2 forgets what was granted, and is tried.
            bool(picked)

    thread = Thread(target=find, name="speccompile-probe", daemon=True)
    thread.start()
    return thread


def try_vectors() -> None:
    """What was taken for granted, Inductor tries when it is asked the next time."""
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for isa in cpu_vec_isa.supported_vec_isa_list:
        # Those that have more than another one keep their own answer.
        forget = getattr(type(isa).__bool__, "cache_clear", None)
        if forget is not None:
            forget()
