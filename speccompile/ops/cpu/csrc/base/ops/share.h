// How an op shares out its work: among the threads of our pool while the calling thread asks for it, else by OpenMP.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "../kernels/pool.h"

#define SPECCOMPILE_EXPORT extern "C" SPECCOMPILE_SHARED

// torch 2.11 compiles C++17, which lacks `constinit`. Without it each use of a thread_local of another file is a call.
#if defined(__cpp_constinit)
#define SPECCOMPILE_CONSTINIT constinit
#elif defined(__clang__)
#define SPECCOMPILE_CONSTINIT [[clang::require_constant_initialization]]
#else
#define SPECCOMPILE_CONSTINIT __constinit
#endif

namespace speccompile {

// Threads of our pool that ops of the calling thread run on; 0 where OpenMP's do.
SPECCOMPILE_CONSTINIT SPECCOMPILE_SHARED extern thread_local int64_t pool_threads;

inline int64_t thread_count() {
  return pool_threads ? pool_threads : static_cast<int64_t>(torch::stable::get_num_threads());
}

// Calls `run(first, last)` for parts of [begin, end), `grain` items or more at once.
template <typename Run>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Run& run) {
  if (pool_threads == 0) {
    torch::stable::parallel_for(begin, end, grain, run);
    return;
  }
  const auto call = [](const void* of, int64_t first, int64_t last) { (*static_cast<const Run*>(of))(first, last); };
  run_in_pool(pool_threads, begin, end, grain, call, &run);
}

// Runs all items. OpenMP's threads get runs of about the same cost; the pool's take items as they get to them.
template <typename Run>
void share_out(const std::vector<int64_t>& costs, Run run) {
  if (pool_threads) {
    parallel_for(0, static_cast<int64_t>(costs.size()), 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        run(i);
      }
    });
    return;
  }
  const int64_t threads = thread_count();
  const int64_t all = std::accumulate(costs.begin(), costs.end(), int64_t{0});
  std::vector<size_t> ends(threads, costs.size());
  int64_t spent = 0;
  for (size_t i = 0, thread = 0; i < costs.size(); ++i) {
    while (thread + 1 < ends.size() && spent * threads >= all * static_cast<int64_t>(thread + 1)) {
      ends[thread++] = i;
    }
    spent += costs[i];
  }
  parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (size_t i = first ? ends[first - 1] : 0; i < ends[last - 1]; ++i) {
      run(i);
    }
  });
}

}  // namespace speccompile
