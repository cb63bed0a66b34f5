// Linears of chosen experts as torch sees them; speccompile/ops/expert_linear.py defines them.
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "expert_linear.h"
#include "../base/ops/chosen_experts.h"
#include "../base/ops/shims.h"

namespace speccompile {

Tensor native_expert_linear(
    const Tensor& x, const Tensor& experts, const Tensor& weight, const std::optional<Tensor>& bias, bool transposed) {
  STD_TORCH_CHECK(weight.dim() == 3, "speccompile::expert_linear: the weight is not [E, F, K]");
  const int64_t count = weight.size(0), depth = weight.size(transposed ? 1 : 2), features = weight.size(transposed ? 2 : 1);
  const ExpertInputs sizes(x, experts, depth);
  STD_TORCH_CHECK(
      !bias || (bias->size(0) == count && bias->size(1) == features && bias->scalar_type() == weight.scalar_type()),
      "speccompile::expert_linear: the bias does not have the weight's sizes, or another dtype");
  const Tensor own_weight = side_by_side(weight), own_bias = bias ? side_by_side(*bias) : own_weight;
  const ExpertWeights weights{type_of(weight), own_weight.data_ptr(), bias ? own_bias.data_ptr() : nullptr,
                              depth,           features,              transposed};
  const ChosenExperts grouped(side_by_side(experts), count);
  const Tensor input = side_by_side(as_float(x)), out = new_floats({sizes.tokens, sizes.each, features});
  // Side by side as their pairs are.
  const int64_t stride = weights.input_stride();
  const Tensor inputs = new_floats({grouped.chosen(), stride});
  const auto* from = static_cast<const float*>(input.data_ptr());
  auto* gathered = static_cast<float*>(inputs.data_ptr());
  auto* to = static_cast<float*>(out.data_ptr());
  parallel_for(0, grouped.chosen(), 32, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      std::memcpy(gathered + i * stride, from + sizes.at(grouped.pairs[i]), depth * sizeof(float));
    }
  });
  if (grouped.chosen() < experts.numel()) {
    std::memset(to, 0, out.numel() * sizeof(float));
  }
  grouped.over_panels(weights.panels(), [&](int64_t expert, int64_t panel, int64_t begin, int64_t rows) {
    expert_panel(weights, expert, gathered + begin * stride, grouped.pairs.data() + begin, rows, to, panel);
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
