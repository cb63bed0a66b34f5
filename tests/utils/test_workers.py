"""OpenMP workers: its own thread lets go."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COUNT = """
import os, threading, time, torch
from speccompile.utils.workers import release_workers

def threads():
    # One that ends is listed for a moment longer.
    time.sleep(0.2)
    return len(os.listdir("/proc/self/task"))

def work():
    torch.relu(torch.ones(2000, 2000))

work()
with_workers = threads()
release_workers()
print(with_workers - threads())
work()
print(with_workers - threads())
result = []

def elsewhere():
    release_workers()
    result.append(threads() - 1)

other = threading.Thread(target=elsewhere)
other.start()
other.join()
print(with_workers - result[0])
"""


@pytest.mark.skipif(sys.platform != "linux" or os.cpu_count() == 1, reason="counts threads by /proc")
def test_only_the_calling_threads_workers_end_and_come_again() -> None:
    code = [sys.executable, "-c", COUNT]
    done = subprocess.run(code, env=os.environ | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True, check=True)
    ended, after_more_work, by_another_thread = map(int, done.stdout.split())
    assert (ended, after_more_work, by_another_thread) == (1, 0, 0), done.stderr
