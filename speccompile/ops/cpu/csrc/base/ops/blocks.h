// What ops over packed weights have in common: blocks of 32 outputs are shared out among threads.
#pragma once

#include <algorithm>
#include <vector>

#include "share.h"
#include "tensors.h"

namespace speccompile {

// Blocks of several weights, as one list that threads share out. A weight is what `run` needs, `blocks` among it, as
// numbers and addresses. The parts of a tensor, which the calling thread has just written, would come from its core's
// cache one after the other: at four bits that takes a tenth of the time.
template <typename Weight, typename Run>
void over_all_blocks(const std::vector<Weight>& weights, const Run& run) {
  int64_t all = 0;
  for (const Weight& weight : weights) {
    all += weight.blocks;
  }
  parallel_for(0, all, 1, [of = weights.data(), run](int64_t first, int64_t last) {
    int64_t begun = 0;
    for (const Weight* weight = of; begun < last; begun += weight++->blocks) {
      const int64_t from = std::max(first - begun, int64_t{0}), to = std::min(last - begun, weight->blocks);
      if (from < to) {
        run(*weight, from, to);
      }
    }
  });
}

// As torch's own embedding, which does not read beside its weight either.
inline void check_ids(const int64_t* ids, int64_t count, int64_t blocks) {
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(ids[i] >= 0 && ids[i] < blocks * kColumns, "embedding: index out of range: ", ids[i]);
  }
}

}  // namespace speccompile
