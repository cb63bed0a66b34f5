// How an op shares out its work: among the threads of our pool while the calling thread asks for it, else by OpenMP.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "../kernels/pool.h"

#define SPECCOMPILE_EXPORT extern "C" __attribute__((visibility("default")))

namespace speccompile {

// Threads of our pool that ops of the calling thread run on; 0 where OpenMP's do.
inline thread_local int64_t pool_threads = 0;

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

}  // namespace speccompile
