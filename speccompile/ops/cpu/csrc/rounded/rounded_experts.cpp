// Linears over rounded weights of chosen experts. The blocks of expert e follow those of expert e - 1.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>

#include "rounded_ops.h"
#include "../base/ops/chosen_experts.h"

namespace speccompile {
namespace {

// Blocks of outputs that an item of work computes.
constexpr int64_t kPanelBlocks = 4;

}  // namespace

template <const RoundedWeight& form>
Tensor rounded_expert_linear(
    const Tensor& x, const Tensor& experts, const Tensor& packed, const Tensor& scales, const std::optional<Tensor>& bias,
    int64_t features) {
  const ExpertInputs sizes(x, experts, x.size(-1));
  const int64_t depth = sizes.depth, groups = groups_of(depth), blocks = (features + kColumns - 1) / kColumns;
  const int64_t count = packed.size(0) / blocks;
  const Scales units = scales_of(form, packed, scales, groups);
  STD_TORCH_CHECK(
      packed.size(0) == count * blocks && (!bias || (bias->size(0) == count && bias->size(1) == features)),
      "speccompile::", form.name, "_expert_linear: the sizes do not fit");
  const ChosenExperts grouped(side_by_side(experts), count);
  const int64_t row_bytes = form.kernel.input_bytes(groups);
  const Tensor input = side_by_side(as_float(x)), out = new_floats({sizes.tokens, sizes.each, features});
  // Inputs and products lie side by side as their pairs do.
  const Tensor inputs = new_tensor({grouped.chosen(), row_bytes}, aoti_torch_dtype_uint8());
  const Tensor input_scales = new_floats({grouped.chosen(), groups}), products = new_floats({grouped.chosen(), features});
  const Tensor added = bias ? side_by_side(as_float(*bias)) : out;
  const auto* from = static_cast<const float*>(input.data_ptr());
  const auto* bias_of = bias ? static_cast<const float*>(added.data_ptr()) : nullptr;
  auto* const q = static_cast<uint8_t*>(inputs.data_ptr());
  auto* const q_scales = static_cast<float*>(input_scales.data_ptr());
  auto* const y = static_cast<float*>(products.data_ptr());
  auto* const to = static_cast<float*>(out.data_ptr());
  parallel_for(0, grouped.chosen(), 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      form.kernel.round_inputs(from + sizes.at(grouped.pairs[i]), depth, groups, q + i * row_bytes, q_scales + i * groups);
    }
  });
  if (grouped.chosen() < experts.numel()) {
    std::memset(to, 0, out.numel() * sizeof(float));
  }
  const auto bytes_of = [](const Tensor& tensor) { return tensor.numel() * tensor.element_size() / tensor.size(0); };
  const int64_t weight_bytes = blocks * bytes_of(packed), scale_bytes = blocks * bytes_of(scales);
  grouped.over_panels(
      (blocks + kPanelBlocks - 1) / kPanelBlocks, [&](int64_t expert, int64_t panel, int64_t begin, int64_t rows) {
        const int64_t first = panel * kPanelBlocks, last = std::min(first + kPanelBlocks, blocks);
        Scales own = units;
        own.values = static_cast<const char*>(units.values) + expert * scale_bytes;
        form.kernel.blocks(
            q + begin * row_bytes, q_scales + begin * groups, rows, groups,
            static_cast<const char*>(packed.data_ptr()) + expert * weight_bytes, own, y + begin * features, features,
            first, last);
        const int64_t column = first * kColumns, columns = std::min(last * kColumns, features) - column;
        for (int64_t row = begin; row < begin + rows; ++row) {
          const float* product = y + row * features + column;
          float* result = to + grouped.pairs[row] * features + column;
          for (int64_t i = 0; i < columns; ++i) {
            result[i] = product[i] + (bias_of ? bias_of[expert * features + column + i] : 0.0f);
          }
        }
      });
  return x.scalar_type() == ScalarType::Float ? out : torch::stable::to(out, x.scalar_type());
}

template Tensor rounded_expert_linear<int8_weight>(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t);
template Tensor rounded_expert_linear<int4_weight>(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t);
template Tensor rounded_expert_linear<fp4_weight>(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t);

namespace {

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("int8_expert_linear", TORCH_BOX(&rounded_expert_linear<int8_weight>));
  m.impl("int4_expert_linear", TORCH_BOX(&rounded_expert_linear<int4_weight>));
  m.impl("fp4_expert_linear", TORCH_BOX(&rounded_expert_linear<fp4_weight>));
}

}  // namespace
}  // namespace speccompile
