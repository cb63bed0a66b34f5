// Which threads ops run on, as speccompile/utils/workers.py chooses.
#include "share.h"

#include <omp.h>

// Of MKL, where torch is built with it: on how many threads its functions run that the calling thread calls. Returns the
// number before, 0 where OpenMP's holds. torch.set_num_threads calls it, too.
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int threads);

namespace speccompile {

SPECCOMPILE_CONSTINIT thread_local int64_t pool_threads = 0;

namespace {

// Tokens of a step, times threads. What Inductor writes runs on one thread beside the pool: of eight tokens on two threads
// that takes no longer than OpenMP's barriers, of 512 a tenth of the step, and its share grows with both.
constexpr int64_t kPoolTokens = 128;

// Outside of the pool.
thread_local int mkl_threads = 0;

}  // namespace

// After the first of these two, ops of the calling thread run in the pool, and OpenMP's and MKL's regions on the calling
// thread alone. OpenMP's workers, which spin for milliseconds after a region, end: they would take the cores from the pool's.
// The second one gives OpenMP its threads again.
//
// Each sets `changed` if it changes anything, and Python then calls the other one. An interrupt may discard what a
// function returns, but not what it has written.
SPECCOMPILE_EXPORT void speccompile_enter_pool(int64_t tokens, bool* changed) {
  const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
  if (pool_threads || tokens * threads > kPoolTokens) {
    return;
  }
  omp_pause_resource_all(omp_pause_soft);
  pool_threads = threads;
  omp_set_num_threads(1);
  if (MKL_Set_Num_Threads_Local) {
    mkl_threads = MKL_Set_Num_Threads_Local(1);
  }
  *changed = true;
}

SPECCOMPILE_EXPORT void speccompile_leave_pool(bool* changed) {
  if (pool_threads) {
    omp_set_num_threads(static_cast<int>(pool_threads));
    if (MKL_Set_Num_Threads_Local) {
      MKL_Set_Num_Threads_Local(mkl_threads);
    }
    pool_threads = 0;
    *changed = true;
  }
}

}  // namespace speccompile
