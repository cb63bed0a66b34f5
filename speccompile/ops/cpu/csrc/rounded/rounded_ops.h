// Linears over rounded weights, which bodies call.
#pragma once

#include <optional>
#include <vector>

#include "../base/ops/linear_ends_of.h"
#include "rounded.h"

namespace speccompile {

// A form of rounded weights, as its tensors have it: numbers in a line of `packed`.
struct RoundedWeight {
  const char* name;
  const RoundedForm& kernel;
  int64_t numbers;
};
extern const RoundedWeight int8_weight, int4_weight, fp4_weight;

inline int64_t groups_of(int64_t depth) {
  return (depth + kGroup - 1) / kGroup;
}

// The scales of a weight whose rows have so many groups.
Scales scales_of(const RoundedWeight& form, const Tensor& packed, const Tensor& scales, int64_t groups);

template <const RoundedWeight& form>
Tensor rounded_linear(
    const Tensor& x, const Tensor& packed, const Tensor& scales, const std::optional<Tensor>& bias, int64_t features);
template <const RoundedWeight& form>
std::vector<Tensor> rounded_linears(
    const Tensor& x, const Ends& ends, const std::vector<Tensor>& packed, const std::vector<Tensor>& scales,
    const std::vector<Tensor>& biases, const std::vector<int64_t>& features);
template <const RoundedWeight& form>
Tensor rounded_expert_linear(
    const Tensor& x, const Tensor& experts, const Tensor& packed, const Tensor& scales, const std::optional<Tensor>& bias,
    int64_t features);

}  // namespace speccompile
