// What ops over packed weights have in common: blocks of 32 outputs are shared out among threads.
#pragma once

#include <algorithm>
#include <vector>

#include "share.h"
#include "tensors.h"

namespace speccompile {

// Blocks of several weights, as one list that threads share out.
template <typename Run>
void over_all_blocks(const std::vector<Tensor>& packed, Run run) {
  int64_t all = 0;
  for (const Tensor& weight : packed) {
    all += weight.size(0);
  }
  parallel_for(0, all, 1, [&](int64_t first, int64_t last) {
    int64_t begun = 0;
    for (size_t i = 0; i < packed.size() && begun < last; begun += packed[i++].size(0)) {
      const int64_t from = std::max(first - begun, int64_t{0}), to = std::min(last - begun, packed[i].size(0));
      if (from < to) {
        run(i, from, to);
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
