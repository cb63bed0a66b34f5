"""Threads with low priority."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import torch


def start_low_priority(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread that calls ``work``. It uses one torch thread, and on Linux the lowest priority."""
    settled, threads = threading.Event(), torch.get_num_threads()

    def run() -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        torch.set_num_threads(1)
        settled.set()
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    settled.wait()
    # Each thread has its own number of torch threads, but new threads start with the number that was set last.
    torch.set_num_threads(threads)
    return thread
