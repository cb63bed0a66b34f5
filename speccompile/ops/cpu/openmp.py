"""OpenMP's regions in the C++ that Inductor writes, where they have one thread.

While a step runs in the pool (``csrc/base/ops/share.cpp``), OpenMP has one thread. libgomp still creates a team for
each region and issues a system call at each barrier. A layer has about five regions: for a small model that is slower
than their arithmetic.
"""

from __future__ import annotations

#: Stands in the source of a body, after other declarations. GCC compiles a region to these two functions. Within the
#: shared library that has them they precede libgomp's, which they lead to where there are more threads.
REGIONS = """\
#if defined(_OPENMP) && defined(__GNUC__) && !defined(__clang__) && !defined(SPECCOMPILE_REGIONS)
#define SPECCOMPILE_REGIONS
#include <dlfcn.h>
#include <omp.h>
extern "C" __attribute__((visibility("hidden"))) void GOMP_parallel(
    void (*run)(void*), void* data, unsigned threads, unsigned flags) {
  if (threads == 0 && omp_get_max_threads() == 1) {
    run(data);
    return;
  }
  static const auto shared = reinterpret_cast<decltype(&GOMP_parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  shared(run, data, threads, flags);
}
extern "C" __attribute__((visibility("hidden"))) void GOMP_barrier() {
  if (omp_get_num_threads() == 1) {
    return;
  }
  static const auto wait = reinterpret_cast<decltype(&GOMP_barrier)>(dlsym(RTLD_DEFAULT, "GOMP_barrier"));
  wait();
}
#endif
"""
