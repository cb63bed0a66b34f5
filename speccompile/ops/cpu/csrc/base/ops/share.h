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

// Where the runs of items end that cost about the same, one for each thread.
inline std::vector<int64_t> even_ends(const std::vector<int64_t>& costs, int64_t threads) {
  const int64_t all = std::accumulate(costs.begin(), costs.end(), int64_t{0});
  std::vector<int64_t> ends(threads, static_cast<int64_t>(costs.size()));
  int64_t spent = 0, thread = 0;
  for (size_t i = 0; i < costs.size() && thread + 1 < threads; ++i) {
    // An item belongs to the thread that has most of it.
    while (thread + 1 < threads && (2 * spent + costs[i]) * threads >= 2 * all * (thread + 1)) {
      ends[thread++] = static_cast<int64_t>(i);
    }
    spent += costs[i];
  }
  return ends;
}

// Runs all items, each thread a run of about the same cost. The pool's threads then take items from one another.
template <typename Run>
void share_out(const std::vector<int64_t>& costs, Run run) {
  const auto items = static_cast<int64_t>(costs.size());
  const int64_t threads = std::min(thread_count(), items);
  const std::vector<int64_t> ends = even_ends(costs, threads);
  const auto run_all = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      run(i);
    }
  };
  if (pool_threads) {
    const auto call = [](const void* of, int64_t first, int64_t last) {
      (*static_cast<const decltype(run_all)*>(of))(first, last);
    };
    run_in_pool(threads, 0, items, 1, call, &run_all, ends.data());
    return;
  }
  parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    run_all(first ? ends[first - 1] : 0, ends[last - 1]);
  });
}

}  // namespace speccompile
