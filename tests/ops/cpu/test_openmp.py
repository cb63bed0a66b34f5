"""OpenMP's regions of one thread in compiled bodies."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from speccompile.ops.cpu.openmp import REGIONS
from speccompile.utils.torch_private import get_cpp_compiler

#: The greatest level of regions, the greatest number of threads, and the sum of what other iterations wrote before.
SOURCE = """
#include <omp.h>
#include <vector>
extern "C" void run(long count, long* found) {
  std::vector<long> values(count);
  long levels = 0, threads = 0, sum = 0;
  #pragma omp parallel reduction(max : levels, threads) reduction(+ : sum)
  {
    levels = omp_get_level();
    threads = omp_get_num_threads();
    #pragma omp for
    for (long i = 0; i < count; ++i) {
      values[i] = i;
    }
    #pragma omp for
    for (long i = 0; i < count; ++i) {
      sum += values[count - 1 - i];
    }
  }
  found[0] = levels;
  found[1] = threads;
  found[2] = sum;
}
"""
COUNT = 100_000

Run = Callable[[], tuple[int, int, int]]


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def built(folder: Path, source: str) -> Run:
    (folder / "regions.cpp").write_text(source)
    command = [get_cpp_compiler(), "-O1", "-fopenmp", "-shared", "-fPIC", "regions.cpp", "-o", "regions.so"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "regions.so"))

    def run() -> tuple[int, int, int]:
        found = (ctypes.c_long * 3)()
        library.run(ctypes.c_long(COUNT), found)
        return found[0], found[1], found[2]

    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return built(tmp_path_factory.mktemp("ours"), REGIONS + SOURCE)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_all_iterations_run_and_wait_for_those_before(threads: int, run: Run) -> None:
    torch.set_num_threads(threads)
    _, found, total = run()
    assert (found, total) == (threads, COUNT * (COUNT - 1) // 2)


def test_one_thread_enters_no_region(run: Run) -> None:
    levels = []
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        levels.append(run()[0])
    assert levels == [0, 1, 0]


def test_of_itself_one_thread_enters_one(tmp_path: Path) -> None:
    """What these functions are for: a compiler that no longer does so can do without them."""
    torch.set_num_threads(1)
    assert built(tmp_path, SOURCE)()[0] == 1
