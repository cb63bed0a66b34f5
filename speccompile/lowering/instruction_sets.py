"""Inductor's probes of what this CPU and compiler can do: processes that it waits for."""

from __future__ import annotations

import contextlib
import functools
import importlib
from threading import Thread


@functools.cache
def instruction_sets() -> Thread:
    """Let Inductor find out beside other work. Who asks it before the thread has ended begins anew."""
    # Not in the thread: two threads that import parts of one package at a time may see each other's half of it.
    importlib.import_module("torch._inductor.codecache")
    pick = importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa

    def find() -> None:
        # Whoever needs the answer asks again, and is told what is wrong.
        with contextlib.suppress(Exception):
            pick()

    thread = Thread(target=find, name="speccompile-probe", daemon=True)
    thread.start()
    return thread
