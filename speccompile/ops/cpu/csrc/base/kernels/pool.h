// Threads that share out an op's work, see pool.cpp.
#pragma once

#include <cstdint>

// What the other libraries of ops call of this one.
#define SPECCOMPILE_SHARED __attribute__((visibility("default")))

namespace speccompile {

// Runs items [first, last). It is called from several threads at once.
using Work = void (*)(const void* run, int64_t first, int64_t last);

// Calls `work` until all items [begin, end) are done, `grain` or more at once unless they are the last ones, on at most
// `threads` threads, the caller among them. Each begins with a share: as many items as the others, or, with `ends`, those
// from the end of the thread before it, counted from `begin` in grains, to its own. Rethrows the first exception of `work`;
// items may be left out then.
SPECCOMPILE_SHARED void run_in_pool(
    int64_t threads, int64_t begin, int64_t end, int64_t grain, Work work, const void* run,
    const int64_t* ends = nullptr);

}  // namespace speccompile
