// Linears of chosen experts as torch sees them; speccompile/ops/expert_linear.py defines them.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "expert_linear.h"
#include "../base/ops/share.h"
#include "../base/ops/shims.h"

namespace speccompile {
namespace {

// The cost of a panel's weights, which are read from memory, in rows that it is multiplied with.
constexpr int64_t kReading = 8;

// Pairs of a token and an expert, those of each expert side by side: expert e has places [begin[e], begin[e + 1]) of `pairs`.
struct Grouped {
  std::vector<int64_t> begin, pairs;
};

// Pairs whose expert is `count` or more belong to none.
Grouped by_expert(const Tensor& experts, int64_t count) {
  const int64_t pairs = experts.numel();
  const auto* expert_of = static_cast<const int64_t*>(experts.data_ptr());
  Grouped grouped{std::vector<int64_t>(count + 1), std::vector<int64_t>(pairs)};
  for (int64_t pair = 0; pair < pairs; ++pair) {
    STD_TORCH_CHECK(expert_of[pair] >= 0, "speccompile::expert_linear: experts must be >= 0, got ", expert_of[pair]);
    if (expert_of[pair] < count) {
      ++grouped.begin[expert_of[pair] + 1];
    }
  }
  for (int64_t expert = 0; expert < count; ++expert) {
    grouped.begin[expert + 1] += grouped.begin[expert];
  }
  std::vector<int64_t> at(grouped.begin.begin(), grouped.begin.end() - 1);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    if (expert_of[pair] < count) {
      grouped.pairs[at[expert_of[pair]]++] = pair;
    }
  }
  return grouped;
}

}  // namespace

Tensor native_expert_linear(
    const Tensor& x, const Tensor& experts, const Tensor& weight, const std::optional<Tensor>& bias, bool transposed) {
  STD_TORCH_CHECK(
      experts.dim() == 2 && experts.scalar_type() == ScalarType::Long && weight.dim() == 3,
      "speccompile::expert_linear: experts are not [P, k] of int64, or the weight not [E, F, K]");
  const int64_t tokens = experts.size(0), each = experts.size(1), count = weight.size(0);
  const int64_t depth = weight.size(transposed ? 1 : 2), features = weight.size(transposed ? 2 : 1);
  const bool own = x.dim() == 3;
  STD_TORCH_CHECK(
      (own || x.dim() == 2) && x.size(0) == tokens && (!own || x.size(1) == each) && x.size(-1) == depth &&
          (!bias || (bias->size(0) == count && bias->size(1) == features)),
      "speccompile::expert_linear: the sizes do not fit");
  STD_TORCH_CHECK(
      !bias || bias->scalar_type() == weight.scalar_type(),
      "speccompile::expert_linear: weight and bias have different dtypes");
  const Tensor own_weight = side_by_side(weight), own_bias = bias ? side_by_side(*bias) : own_weight;
  const ExpertWeights weights{type_of(weight), own_weight.data_ptr(), bias ? own_bias.data_ptr() : nullptr,
                              depth,           features,              transposed};
  const Grouped grouped = by_expert(side_by_side(experts), count);
  const Tensor input = side_by_side(as_float(x)), out = new_floats({tokens, each, features});
  const int64_t chosen = grouped.begin.back();
  // Side by side as their pairs are.
  const int64_t stride = weights.input_stride();
  const Tensor inputs = new_floats({chosen, stride});
  const auto* from = static_cast<const float*>(input.data_ptr());
  auto* gathered = static_cast<float*>(inputs.data_ptr());
  auto* to = static_cast<float*>(out.data_ptr());
  parallel_for(0, chosen, 32, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t pair = grouped.pairs[i];
      std::memcpy(gathered + i * stride, from + (own ? pair : pair / each) * depth, depth * sizeof(float));
    }
  });
  if (chosen < tokens * each) {
    std::memset(to, 0, out.numel() * sizeof(float));
  }
  struct Item {
    int64_t expert, panel;
  };
  std::vector<Item> items;
  std::vector<int64_t> costs;
  for (int64_t expert = 0; expert < count; ++expert) {
    const int64_t rows = grouped.begin[expert + 1] - grouped.begin[expert];
    for (int64_t panel = 0; rows > 0 && panel < weights.panels(); ++panel) {
      items.push_back({expert, panel});
      costs.push_back(kReading + rows);
    }
  }
  share_out(costs, [&](int64_t i) {
    const Item& item = items[i];
    const int64_t begin = grouped.begin[item.expert], rows = grouped.begin[item.expert + 1] - begin;
    expert_panel(weights, item.expert, gathered + begin * stride, grouped.pairs.data() + begin, rows, to, item.panel);
  });
  return x.scalar_type() == ScalarType::Float ? out : torch::stable::to(out, x.scalar_type());
}

SHIM aoti_torch_cpu_native_expert_linear(
    Handle x, Handle experts, Handle weight, const Handle* bias, int32_t transposed, Handle* out) {
  const Recorded recorded("speccompile::native_expert_linear");
  *out = handed_over(native_expert_linear(shared(x), shared(experts), shared(weight), shared_if(bias), transposed));
  return AOTI_TORCH_SUCCESS;
}

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("native_expert_linear", TORCH_BOX(&native_expert_linear));
}

}  // namespace speccompile
