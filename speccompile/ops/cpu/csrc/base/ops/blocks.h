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

inline std::vector<Tensor> new_outputs(const Tensor& x, const std::vector<int64_t>& features) {
  std::vector<Tensor> made;
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  for (const int64_t count : features) {
    sizes.back() = count;
    made.push_back(new_floats(sizes));
  }
  return made;
}

inline std::vector<Tensor> as_dtype(std::vector<Tensor> outputs, ScalarType dtype) {
  if (dtype != ScalarType::Float) {
    for (Tensor& out : outputs) {
      out = torch::stable::to(out, dtype);
    }
  }
  return outputs;
}

// As torch's own embedding, which does not read beside its weight either.
inline void check_ids(const Tensor& ids, int64_t blocks) {
  const auto* id = static_cast<const int64_t*>(ids.data_ptr());
  for (int64_t i = 0; i < ids.numel(); ++i) {
    STD_TORCH_CHECK(id[i] >= 0 && id[i] < blocks * kColumns, "embedding: index out of range: ", id[i]);
  }
}

}  // namespace speccompile
