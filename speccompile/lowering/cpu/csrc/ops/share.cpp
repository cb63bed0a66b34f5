// Which threads ops run on, as speccompile/lowering/workers.py chooses.
#include "share.h"

#include <omp.h>

namespace speccompile {
namespace {

// Tokens of a step, times threads. What Inductor writes runs on one thread beside the pool: of eight tokens on two threads
// that takes no longer than OpenMP's barriers, of 512 a tenth of the step, and its share grows with both.
constexpr int64_t kPoolTokens = 128;

}  // namespace

// Between these two, ops of the calling thread run in the pool, and OpenMP's regions on the calling thread alone.
// OpenMP's workers, which spin for milliseconds after a region, end: they would take the cores from the pool's. Returns
// how many threads there are otherwise, 0 if nothing has changed: the step is too wide, or the thread is in the pool.
SPECCOMPILE_EXPORT int64_t speccompile_enter_pool(int64_t tokens) {
  const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
  if (pool_threads || tokens * threads > kPoolTokens) {
    return 0;
  }
  omp_pause_resource_all(omp_pause_soft);
  pool_threads = threads;
  omp_set_num_threads(1);
  return threads;
}

SPECCOMPILE_EXPORT void speccompile_leave_pool(int64_t threads) {
  if (threads) {
    pool_threads = 0;
    omp_set_num_threads(static_cast<int>(threads));
  }
}

}  // namespace speccompile
