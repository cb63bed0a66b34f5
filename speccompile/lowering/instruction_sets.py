"""What this CPU and compiler can do, as Inductor finds it out."""

from __future__ import annotations

import contextlib
import functools
import importlib
from threading import Thread

import torch._inductor.config as inductor_config


@functools.cache
def instruction_sets() -> Thread:
    """Let Inductor find out beside other work. Who asks it before the thread has ended begins anew.

    Torch's vectors are not compiled and loaded for trial, once for each kind that this CPU has: the C++ ops are made of
    them. Where those do not come about, see :func:`try_vectors`.
    """
    # Not in the thread: two threads that import parts of one package at a time may see each other's half of it.
    importlib.import_module("torch._inductor.codecache")
    pick = importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa
    asked = inductor_config.cpp.vec_isa_ok
    granted = inductor_config.patch("cpp.vec_isa_ok", True) if asked is None else contextlib.nullcontext()

    def find() -> None:
        # Whoever needs the answer asks again, and is told what is wrong.
        with contextlib.suppress(Exception), granted:
            pick()

    thread = Thread(target=find, name="speccompile-probe", daemon=True)
    thread.start()
    return thread


def try_vectors() -> None:
    """What was taken for granted, Inductor tries when it is asked the next time."""
    importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list.cache_clear()
