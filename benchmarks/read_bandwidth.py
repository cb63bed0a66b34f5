"""The read bandwidth of this machine: a loop in C++ over a buffer, on as many threads as torch has."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch

from speccompile.utils.torch_private import get_cpp_compiler

_SOURCE = """
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

static std::atomic<uint64_t> sink;

// Seconds from the start of all threads until the last one has read its part of from[count].
extern "C" double read_once(const uint64_t* from, int64_t count, int threads) {
  using Clock = std::chrono::steady_clock;
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  const auto work = [&](int thread) {
    const int64_t begin = count * thread / threads, end = count * (thread + 1) / threads;
    ready.fetch_add(1);
    while (!go.load()) {
    }
    uint64_t sums[32] = {};
    int64_t i = begin;
    for (; i + 32 <= end; i += 32) {
      for (int j = 0; j < 32; ++j) {
        sums[j] += from[i + j];
      }
    }
    uint64_t sum = 0;
    for (; i < end; ++i) {
      sum += from[i];
    }
    for (const uint64_t part : sums) {
      sum += part;
    }
    sink.fetch_add(sum);
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) {
    others.emplace_back(work, thread);
  }
  while (ready.load() < threads - 1) {
  }
  const auto started = Clock::now();
  go.store(true);
  work(0);
  for (std::thread& other : others) {
    other.join();
  }
  return std::chrono::duration<double>(Clock::now() - started).count();
}
"""


class ReadBuffer:
    """A buffer of ``nbytes`` that can be read once.

    Raises:
        RuntimeError: no C++ compiler was found.
        CalledProcessError: the compiler failed.
    """

    def __init__(self, nbytes: int) -> None:
        self._buffer = torch.ones(-(-nbytes // 8), dtype=torch.int64)
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "read.cpp"), Path(folder, "read.so")
            source.write_text(_SOURCE)
            options = ["-O3", "-march=native", "-pthread", "-shared", "-fPIC", "-o", str(library)]
            subprocess.run([get_cpp_compiler(), *options, str(source)], check=True)
            self._read = ctypes.CDLL(str(library)).read_once
        self._read.restype = ctypes.c_double
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]

    def seconds(self) -> float:
        """Read it, and return how long that took."""
        took: float = self._read(self._buffer.data_ptr(), len(self._buffer), torch.get_num_threads())
        return took
